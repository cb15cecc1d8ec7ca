"""Limit of concurrent requests at a server of others."""

from hypothesis import given
from hypothesis import strategies as st

from solver.scheduling.concurrency import ConcurrencyLimit

MOST = 64
steps = st.lists(
    st.one_of(
        st.tuples(st.just("queue"), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.floats(0.001, 100), st.integers(0, 100)),
    ),
    max_size=80,
)


@given(steps=steps, first=st.integers(1, 100))
def test_limit_stays_between_one_and_its_maximum(steps: list[tuple], first: int) -> None:  # type: ignore[type-arg]  # two kinds
    limit = ConcurrencyLimit(most=MOST, first=first)
    for kind, *values in steps:
        if kind == "queue":
            running, waiting, ours = values
            limit.queue_seen(running=running, waiting=waiting, ours=ours, ours_waiting=ours // 2)
        else:
            wait_s, ours = values
            limit.answer_begun(wait_s, ours=ours)
        assert 1 <= limit.limit <= MOST


def look(limit: ConcurrencyLimit, *, running: int, waiting: int, ours: int, times: int) -> None:
    for _ in range(times):
        limit.queue_seen(running=running, waiting=waiting, ours=ours, ours_waiting=ours)


def test_queue_in_the_server_limits_us_to_what_it_runs() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    look(limit, running=10, waiting=6, ours=16, times=10)

    assert limit.limit == 10


def test_requests_that_wait_for_the_next_iteration_are_no_queue() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    for _ in range(10):
        look(limit, running=2, waiting=1, ours=3, times=9)
        look(limit, running=3, waiting=0, ours=3, times=1)

    assert limit.limit == MOST


def test_queue_of_others_alone_does_not_limit_us() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    for _ in range(30):
        limit.queue_seen(running=30, waiting=9, ours=4, ours_waiting=0)

    assert limit.limit == MOST


def test_requests_of_others_take_our_places() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    look(limit, running=30, waiting=5, ours=8, times=10)

    assert limit.limit == 3


def test_server_with_places_for_ten_rarely_gets_more() -> None:
    """Once the places are known, a request more is tried every twenty looks only."""
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    queued = 0
    for _ in range(400):
        ours = limit.limit
        queued += ours > 10
        look(limit, running=min(ours, 10), waiting=max(0, ours - 10), ours=ours, times=1)

    assert limit.limit in (10, 11)
    assert queued <= 10 + 400 * 10 // 20


def test_limit_grows_only_while_it_is_used() -> None:
    limit = ConcurrencyLimit(most=MOST, first=10)
    look(limit, running=2, waiting=0, ours=2, times=1)
    unused = limit.limit
    for _ in range(100):
        look(limit, running=limit.limit, waiting=0, ours=limit.limit, times=1)

    assert (unused, limit.limit) == (10, MOST)


def test_server_without_a_report_gets_as_many_requests_as_begin_at_once() -> None:
    """A server runs 12 requests at once; more of them wait for a place."""
    limit = ConcurrencyLimit(most=MOST, first=8)
    sizes = []
    for _ in range(400):
        ours = limit.limit
        limit.answer_begun(0.1 if ours <= 12 else 0.1 + 0.5 * (ours - 12), ours=ours)
        sizes.append(limit.limit)

    assert 10 <= min(sizes[-100:]) <= max(sizes[-100:]) <= 14
