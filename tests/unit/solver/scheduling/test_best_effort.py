"""Best-effort work beside interactive work: what it may take, what it gives back."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.admission import PlannedBatch
from solver.scheduling.best_effort import Allowance, freed_tokens, kv_victims
from solver.scheduling.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)
from solver.scheduling.entry import Entry
from solver.scheduling.latency import LatencyTable
from solver.scheduling.options import VARIANTS, SchedulingOptions
from solver.scheduling.qoserve import QoServePolicy
from tests.unit.solver.scheduling.running import Running

LATENCY = LatencyTable(tuple(1e-4 * n for n in range(8193)), context_s=1e-6)
"""A token takes 0.1 ms, reading a token of context 1 µs."""
OPTIONS = replace(VARIANTS["conserve"], curve_chunking=False, latency_margin=0.0)
CHAT, FILLER = Slo(ttft_s=1, tbt_s=0.1), Slo()


def entry_of(place: int, prompt: int = 1000) -> Entry:
    view = RequestView(
        request_id=RequestId(str(place)),
        arrived_at=0.0,
        prompt_tokens=prompt,
        max_tokens=100,
        slo=FILLER,
    )
    return Entry(view, place)


def started(place: int, computed: int, *, prefill: int = 1000) -> tuple[Entry, Running]:
    entry = entry_of(place)
    entry.prefill_tokens = max(0, prefill - computed)
    run = Running(
        request_id=RequestId(str(place)), num_prefill_tokens=prefill, num_computed_tokens=computed
    )
    return entry, run


def batch_of(*running: Running, free_kv_tokens: int = 10_000) -> BatchState:
    return BatchState(
        running=running,
        num_waiting=0,
        max_running=64,
        max_budget_tokens=4096,
        free_kv_tokens=free_kv_tokens,
    )


class Rig:
    """A policy, and an engine that is told what it holds."""

    def __init__(self, options: SchedulingOptions = OPTIONS) -> None:
        self.policy = QoServePolicy(LATENCY, options)
        self.running: list[Running] = []
        self.free_kv_tokens = 100_000

    def wait(self, name: str, slo: Slo, *, prompt: int = 1000) -> None:
        self.policy.add(
            RequestView(
                request_id=RequestId(name),
                arrived_at=0.0,
                prompt_tokens=prompt,
                max_tokens=100,
                slo=slo,
            )
        )

    def start(
        self, name: str, slo: Slo, *, computed: int, prompt: int = 1000, outputs: int = 0
    ) -> None:
        self.wait(name, slo, prompt=prompt)
        offered = self.policy.decide(0.0, batch_of(free_kv_tokens=10**9)).order
        assert RequestId(name) in list(offered)
        iteration = Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.0)
        outcome = IterationOutcome(iteration=iteration, admitted=(RequestId(name),))
        self.policy.observe(0.0, outcome)
        run = Running(
            request_id=RequestId(name),
            num_prefill_tokens=prompt,
            num_computed_tokens=computed,
            num_output_tokens=outputs,
        )
        self.running.append(run)

    def decide(self, now: float = 0.5) -> IterationDecision:
        return self.policy.decide(now, batch_of(*self.running, free_kv_tokens=self.free_kv_tokens))


def test_the_least_progress_is_given_up_first() -> None:
    victims = kv_victims([started(1, 900), started(2, 1500, prefill=1500), started(3, 100)], 1000)

    assert [entry.place for entry, _ in victims] == [3]


def test_of_equal_progress_the_latest_gives_way() -> None:
    victims = kv_victims([started(1, 1000), started(2, 1000), started(3, 1000)], 500)

    assert [entry.place for entry, _ in victims] == [3]


def test_small_victims_are_spared_when_a_larger_one_is_needed_anyway() -> None:
    decodes = [started(1, 1000), started(2, 1200, prefill=1200), started(3, 9000, prefill=9000)]

    assert [entry.place for entry, _ in kv_victims(decodes, 9000)] == [3]


def test_kv_is_not_given_up_in_vain() -> None:
    assert kv_victims([started(1, 1000), started(2, 2000)], 100_000) == []


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3000), max_size=8),
    st.integers(1, 9000),
)
def test_victims_are_enough_and_none_of_them_is_superfluous(
    computed: list[int], needed: int
) -> None:
    candidates = [started(place, tokens) for place, tokens in enumerate(computed)]
    freed = [freed_tokens(*victim) for victim in kv_victims(candidates, needed)]

    if sum(freed_tokens(*each) for each in candidates) < needed:
        assert freed == []
    else:
        assert sum(freed) >= needed
        assert all(sum(freed) - each < needed for each in freed)


def allowance(
    *running: Running, reserve: float = 0.1, share: float = 0.5, limit_s: float = 0.1
) -> Allowance:
    return Allowance(
        replace(OPTIONS, best_effort_kv_reserve=reserve, best_effort_decode_share=share),
        LATENCY,
        batch_of(*running),
        decodes=PlannedBatch(tokens=len(running), context_tokens=10_000 * len(running)),
        prefills=(),
        limit_s=limit_s,
    )


def test_a_share_of_all_kv_is_reserved() -> None:
    """10,000 tokens are free and 20,000 in use."""
    running = [Running(request_id=RequestId(name), num_computed_tokens=10_000) for name in "ab"]

    assert allowance(*running).kv_reserve_tokens == 3000


def test_best_effort_starts_while_all_decodes_fit_into_their_share() -> None:
    """Of 50 ms two decodes take 20.2; another takes 0.1 and 1 µs a token."""
    running = [Running(request_id=RequestId(name), num_computed_tokens=10_000) for name in "ab"]
    allowed = allowance(*running)

    assert allowed.admits(entry_of(1, prompt=29_000))
    assert not allowed.admits(entry_of(2, prompt=30_000))


def test_what_starts_in_the_same_iteration_counts() -> None:
    running = [Running(request_id=RequestId(name), num_computed_tokens=10_000) for name in "ab"]
    allowed = allowance(*running)
    allowed.count(entry_of(1, prompt=20_000))

    assert allowed.admits(entry_of(2, prompt=9000))
    assert not allowed.admits(entry_of(3, prompt=10_000))


def test_an_idle_engine_takes_anything() -> None:
    allowed = allowance(reserve=1.0, share=0.0)

    assert allowed.kv_reserve_tokens == 0
    assert allowed.admits(entry_of(1, prompt=10**6))


def test_without_online_work_nothing_limits_decodes() -> None:
    run = Running(request_id=RequestId("a"), num_computed_tokens=10_000)

    assert allowance(run, limit_s=inf).admits(entry_of(1, prompt=10**6))


def test_filler_takes_what_the_pace_leaves() -> None:
    """100 ms: one decode and 1000 tokens of its context take 1.1 ms, the rest 989 tokens."""
    rig = Rig()
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.wait("filler", FILLER, prompt=8000)
    decision = rig.decide()

    assert list(decision.order) == ["filler"]
    assert decision.token_budget == 990


def test_a_steady_pace_holds_whatever_time_was_saved_or_lost() -> None:
    """QoServe would spend what was saved, and not care for one whose first token was late."""
    steady, saving = Rig(), Rig(replace(OPTIONS, steady_pace=False))
    for rig in (steady, saving):
        rig.start("chat", CHAT, computed=1000, outputs=1)
        rig.wait("filler", FILLER, prompt=8000)

    assert steady.decide(0.0).token_budget == steady.decide(5.0).token_budget == 990
    assert saving.decide(0.0).token_budget == 2500


def test_offline_decodes_set_no_pace() -> None:
    rig = Rig()
    rig.start("filler", FILLER, computed=1000, outputs=1)
    rig.wait("more", FILLER, prompt=8000)

    assert rig.decide().token_budget == 2500


def test_waiting_online_work_takes_the_kv_of_offline_decodes() -> None:
    rig = Rig()
    rig.start("done", FILLER, computed=1002, outputs=3)
    rig.start("new", FILLER, computed=1001, outputs=2)
    rig.free_kv_tokens = 100
    rig.wait("chat", CHAT, prompt=1000)
    decision = rig.decide()

    assert decision.preempted == {"new"}
    assert next(iter(decision.order)) == "chat"


def test_offline_decodes_are_preempted_only_where_that_is_wanted() -> None:
    rig = Rig(replace(OPTIONS, best_effort_yields=False))
    rig.start("new", FILLER, computed=1001, outputs=2)
    rig.free_kv_tokens = 100
    rig.wait("chat", CHAT, prompt=1000)

    assert rig.decide().preempted == frozenset()


def test_offline_work_makes_room_before_online_decodes_run_out() -> None:
    rig = Rig()
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.start("filler", FILLER, computed=1001, outputs=2)
    rig.free_kv_tokens = 16

    assert rig.decide().preempted == {"filler"}


def test_offline_work_does_not_begin_in_the_reserve() -> None:
    rig = Rig(replace(OPTIONS, best_effort_kv_reserve=0.5))
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.wait("filler", FILLER, prompt=6000)
    rig.free_kv_tokens = 11_000
    in_reserve = list(rig.decide().order)
    rig.free_kv_tokens = 20_000

    assert in_reserve == []
    assert list(rig.decide().order) == ["filler"]


def test_a_lull_does_not_fill_the_engine_with_offline_decodes() -> None:
    """The limit of the last online work goes on: 50 of 100 ms hold 50,000 tokens of context."""
    rig = Rig(replace(OPTIONS, best_effort_decode_share=0.5))
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.decide()
    rig.policy.remove(RequestId("chat"))
    rig.running = []
    rig.start("filler", FILLER, computed=40_000, prompt=40_000, outputs=1)
    rig.wait("more", FILLER, prompt=11_000)

    assert list(rig.decide().order) == []


@pytest.mark.parametrize(("prompt", "held"), [(400, set()), (600, {"filler"})])
def test_a_running_filler_rests_rather_than_take_from_an_online_chunk(
    prompt: int, held: set[str]
) -> None:
    """Its engine would serve it first; a cap that keeps 600 of 989 tokens free cuts both."""
    rig = Rig()
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.start("filler", FILLER, computed=16, prompt=8000)
    rig.wait("new", CHAT, prompt=prompt)
    decision = rig.decide()

    assert next(iter(decision.order)) == "new"
    assert decision.held == held
    assert (decision.per_request_cap or inf) >= prompt
