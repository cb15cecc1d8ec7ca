"""Selective preemption: which prefills may pause or lose KV, and how they share a budget."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.decision import RequestView
from solver.scheduling.engine.entry import Entry, Rank
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.pace import EnginePace
from solver.scheduling.engine.preemption import may_rest, memory_victims, shared_cap


@dataclass(kw_only=True)
class Prefill:
    request_id: RequestId
    num_computed_tokens: int
    num_prefill_tokens: int = 1000
    num_output_tokens: int = 0
    is_prefill: bool = True


def entry_of(place: int, *, ttlt_s: float = 100, rank: Rank = Rank.REGULAR) -> Entry:
    view = RequestView(
        request_id=RequestId(str(place)),
        arrived_at=0.0,
        prompt_tokens=1000,
        max_tokens=1,
        slo=Slo(ttlt_s=ttlt_s),
    )
    return Entry(view, place, rank=rank, decode_tokens=2, mean_decode_tokens=2)


def rests(entry: Entry, now: float) -> bool:
    """True if a prefill may pause; a prefill token takes 10 ms and an iteration 1 s."""
    pace = EnginePace(LatencyTable(tuple(0.01 * n for n in range(101))), chunk_tokens=100)
    return may_rest(entry, now=now, pace=pace)


def test_a_prefill_pauses_unless_that_makes_it_late() -> None:
    # The request needs 10 s for its prompt and 2 s for two answer tokens, and is due at 100 s.
    assert rests(entry_of(1), 86.9)
    assert not rests(entry_of(1), 87.1)


def test_a_late_or_relegated_prefill_may_pause() -> None:
    assert rests(entry_of(1), 88.1)
    assert rests(entry_of(1, rank=Rank.RELEGATED), 87.1)


def held(
    place: int, *, computed: int, remaining: int = 0, rank: Rank = Rank.RELEGATED
) -> tuple[Entry, Prefill]:
    """A running prefill with *computed* tokens in KV and *remaining* tokens of its prompt."""
    entry = entry_of(place, rank=rank)
    entry.prefill_tokens = remaining
    return entry, Prefill(request_id=RequestId(str(place)), num_computed_tokens=computed)


def test_only_the_needed_memory_is_given_up_the_least_valuable_first() -> None:
    prefills = [
        held(1, computed=9),
        held(2, computed=5),
        held(3, computed=1, rank=Rank.BEST_EFFORT),
    ]

    assert [entry.place for entry, _ in memory_victims(prefills, 8)] == [3, 1]


def test_memory_is_not_given_up_without_effect() -> None:
    assert memory_victims([held(1, computed=9)], 10) == []


def test_victim_also_frees_what_was_reserved_for_the_rest_of_its_prompt() -> None:
    prefills = [held(1, computed=6, remaining=4), held(2, computed=5, remaining=100)]

    assert [entry.place for entry, _ in memory_victims(prefills, 10)] == [1]
    assert [entry.place for entry, _ in memory_victims(prefills, 11)] == [1, 2]


@given(
    remaining=st.lists(st.integers(1, 5000), min_size=1, max_size=8), budget=st.integers(8, 4000)
)
def test_a_shared_cap_uses_the_whole_budget_and_serves_all_prefills(
    remaining: list[int], budget: int
) -> None:
    cap = shared_cap(remaining, budget)

    if sum(remaining) <= budget:
        assert cap is None
    else:
        assert cap is not None
        given_tokens = sum(min(tokens, cap) for tokens in remaining)
        assert budget - len(remaining) < given_tokens <= budget
