"""Limits of pulling ahead of time."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from solver.scheduling.pull_room import (
    Held,
    PullBounds,
    counted_s,
    has_best_effort_room,
    has_room,
    is_loaded,
    work_s,
)

BOUNDS = PullBounds(window=4, best_effort_window=2, max_backlog_s=1.0)
seconds = st.floats(0, 100)
counts = st.integers(0, 50)
held = st.builds(
    Held,
    num_regular=counts,
    num_best_effort=counts,
    num_pulling=st.integers(0, 8),
    regular_s=seconds,
    best_effort_s=seconds,
    regular_tokens=counts,
    best_effort_tokens=counts,
)
bounds = st.builds(
    PullBounds,
    window=st.integers(1, 64),
    best_effort_window=st.integers(0, 64),
    max_backlog_s=st.floats(0.01, 60),
    max_tokens=st.integers(1, 100),
)


def test_an_idle_instance_may_pull_any_request():
    assert has_room(Held(), BOUNDS)
    assert has_best_effort_room(Held(), BOUNDS)


def test_the_window_counts_pulls_in_progress():
    assert has_room(Held(num_regular=2, num_pulling=1), BOUNDS)
    assert not has_room(Held(num_regular=2, num_pulling=2), BOUNDS)


def test_the_backlog_is_bounded_in_seconds():
    assert has_room(Held(num_regular=1, regular_s=0.9), BOUNDS)
    assert not has_room(Held(num_regular=1, regular_s=1.0), BOUNDS)


def test_best_effort_limits_regular_pulls_only_by_its_number():
    assert has_room(Held(num_best_effort=2, best_effort_s=50.0), BOUNDS)
    assert not has_best_effort_room(Held(num_best_effort=1, best_effort_s=50.0), BOUNDS)
    assert not has_best_effort_room(Held(num_best_effort=2), BOUNDS)


def test_without_a_free_slot_whole_answers_are_waited_for():
    assert work_s(prefill_s=1.0, whole_s=9.0, num_free_slots=1) == 1.0
    assert work_s(prefill_s=1.0, whole_s=9.0, num_free_slots=0) == 9.0
    assert work_s(prefill_s=1.0, whole_s=0.5, num_free_slots=0) == 1.0


def test_one_long_prompt_does_not_stop_an_instance_from_pulling():
    long_s = counted_s(100.0, BOUNDS)

    assert counted_s(0.1, BOUNDS) == 0.1
    assert has_room(Held(num_regular=1, regular_s=long_s), BOUNDS)
    assert has_room(Held(num_regular=3, regular_s=3 * long_s), BOUNDS)


@given(held=held, bounds=bounds)
def test_room_for_best_effort_implies_room(held: Held, bounds: PullBounds):
    assert has_room(held, bounds) or not has_best_effort_room(held, bounds)


@given(held=held, bounds=bounds)
def test_larger_bounds_never_mean_less_room(held: Held, bounds: PullBounds):
    wider = replace(
        bounds,
        window=bounds.window + 1,
        max_backlog_s=bounds.max_backlog_s + 1,
        max_tokens=bounds.max_tokens + 1,
    )
    assert has_room(held, bounds) <= has_room(held, wider)
    assert has_best_effort_room(held, bounds) <= has_best_effort_room(held, wider)


@given(held=held, bounds=bounds)
def test_more_held_never_means_more_room(held: Held, bounds: PullBounds):
    more = replace(
        held,
        num_regular=held.num_regular + 1,
        regular_s=held.regular_s + 0.5,
        regular_tokens=held.regular_tokens + 1,
    )
    assert has_room(more, bounds) <= has_room(held, bounds)
    assert has_best_effort_room(more, bounds) <= has_best_effort_room(held, bounds)


@given(bounds=bounds, work=st.lists(seconds, max_size=100))
def test_pulling_while_there_is_room_stops_at_the_bounds(bounds: PullBounds, work: list[float]):
    now = Held()
    for each_s in work:
        if not has_room(now, bounds):
            break
        before_s = now.regular_s
        now = replace(now, num_regular=now.num_regular + 1, regular_s=now.regular_s + each_s)
        assert now.num_requests == 1 or before_s < bounds.max_backlog_s
    assert now.num_requests <= bounds.window


def test_an_instance_with_half_the_maximum_backlog_is_loaded():
    assert is_loaded(Held(num_regular=1, regular_s=0.5), BOUNDS)
    assert not is_loaded(Held(num_regular=1, regular_s=0.4), BOUNDS)


def test_pulls_stop_at_the_engines_memory():
    """Pulls stop when the running batch reaches the capacity (QLM §5) and one request waits."""
    bounds = replace(BOUNDS, max_tokens=100)

    assert has_room(Held(num_regular=1, regular_tokens=99), bounds)
    assert not has_room(Held(num_regular=1, regular_tokens=100), bounds)
    assert has_room(Held(), replace(BOUNDS, max_tokens=0))


def test_best_effort_memory_blocks_only_best_effort():
    bounds = replace(BOUNDS, max_tokens=100)
    held = Held(num_best_effort=1, best_effort_tokens=100)

    assert has_room(held, bounds)
    assert not has_best_effort_room(held, bounds)
