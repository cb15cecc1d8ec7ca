"""Best-effort requests that lose their KV: enough for the demand, never without effect."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from solver.scheduling.engine.best_effort import freed_tokens, kv_victims
from solver.scheduling.engine.entry import Entry
from tests.unit.solver.scheduling.best_effort_rig import entry_of
from tests.unit.solver.scheduling.running import Running


def started(place: int, computed: int, *, prefill: int = 1000) -> tuple[Entry, Running]:
    entry = entry_of(place)
    entry.prefill_tokens = max(0, prefill - computed)
    run = Running(
        request_id=RequestId(str(place)), num_prefill_tokens=prefill, num_computed_tokens=computed
    )
    return entry, run


def test_the_least_progress_is_preempted_first() -> None:
    victims = kv_victims([started(1, 900), started(2, 1500, prefill=1500), started(3, 100)], 1000)

    assert [entry.place for entry, _ in victims] == [3]


def test_of_equal_progress_the_latest_is_preempted() -> None:
    victims = kv_victims([started(1, 1000), started(2, 1000), started(3, 1000)], 500)

    assert [entry.place for entry, _ in victims] == [3]


def test_small_victims_are_spared_if_a_larger_one_is_needed_anyway() -> None:
    decodes = [started(1, 1000), started(2, 1200, prefill=1200), started(3, 9000, prefill=9000)]

    assert [entry.place for entry, _ in kv_victims(decodes, 9000)] == [3]


def test_kv_is_not_given_up_without_effect() -> None:
    assert kv_victims([started(1, 1000), started(2, 2000)], 100_000) == []


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3000), max_size=8),
    st.integers(1, 9000),
)
def test_victims_are_enough_and_all_are_needed(computed: list[int], needed: int) -> None:
    candidates = [started(place, tokens) for place, tokens in enumerate(computed)]
    freed = [freed_tokens(*victim) for victim in kv_victims(candidates, needed)]

    if sum(freed_tokens(*each) for each in candidates) < needed:
        assert freed == []
    else:
        assert sum(freed) >= needed
        assert all(sum(freed) - each < needed for each in freed)
