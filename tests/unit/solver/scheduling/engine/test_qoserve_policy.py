"""Decisions of the composed policy in one iteration."""

from dataclasses import replace

import pytest

from shared.contracts.base import RequestId
from shared.contracts.qos import Importance, Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)
from solver.scheduling.engine.entry import Rank
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import VARIANTS, SchedulingOptions
from solver.scheduling.engine.qoserve import QoServePolicy
from tests.unit.solver.scheduling.running import Running

LATENCY = LatencyTable(tuple(0.00495 + 1e-4 * n for n in range(4097)))
"""A prefill token takes 0.1 ms."""
OPTIONS = VARIANTS["qoserve"]
CHAT, SOON, LATER = Slo(ttft_s=6, tbt_s=0.05), Slo(ttlt_s=600), Slo(ttlt_s=1800)


class Rig:
    """A policy, and an engine with given requests."""

    def __init__(self, options: SchedulingOptions = OPTIONS) -> None:
        self.policy = QoServePolicy(LATENCY, options)
        self.running: list[Running] = []
        self.free_kv_tokens = 100_000
        self.max_running = 64

    def wait(
        self,
        name: str,
        slo: Slo,
        *,
        prompt: int = 1000,
        arrived_at: float = 0.0,
        importance: Importance = Importance.HIGH,
        application: str = "*",
    ) -> None:
        self.policy.add(
            RequestView(
                request_id=RequestId(name),
                arrived_at=arrived_at,
                prompt_tokens=prompt,
                max_tokens=100,
                slo=slo,
                importance=importance,
                application=application,
            )
        )

    def start(
        self,
        name: str,
        slo: Slo,
        *,
        computed: int,
        prompt: int = 1000,
        outputs: int = 0,
        application: str = "*",
    ) -> None:
        """Add a request that is already running."""
        self.wait(name, slo, prompt=prompt, application=application)
        for request_id in self.decide(0.0).order:
            if request_id == name:
                break
        self.policy.observe(0.0, outcome(admitted=(name,)))
        self.running.append(
            Running(
                request_id=RequestId(name),
                num_prefill_tokens=prompt,
                num_computed_tokens=computed,
                num_output_tokens=outputs,
            )
        )

    def decide(self, now: float) -> IterationDecision:
        return self.policy.decide(
            now,
            BatchState(
                running=self.running,
                num_waiting=0,
                max_running=self.max_running,
                max_budget_tokens=4096,
                free_kv_tokens=self.free_kv_tokens,
            ),
        )

    def order(self, now: float = 0.0) -> list[str]:
        return list(self.decide(now).order)


def outcome(*, admitted: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> IterationOutcome:
    return IterationOutcome(
        iteration=Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.0),
        admitted=tuple(map(RequestId, admitted)),
        preempted=tuple(map(RequestId, preempted)),
    )


def test_chunks_follow_the_papers_example() -> None:
    """QoServe §3.5: A overtakes D; chunks are large while A has slack, then small, then largest."""
    rig = Rig()
    for name, slo in (("B", SOON), ("C", LATER), ("D", SOON), ("E", LATER)):
        rig.wait(name, slo, prompt=4000)
    rig.wait("A", CHAT, arrived_at=1.0)
    assert rig.order(1.0) == ["A", "B", "D", "C", "E"]

    rig.policy.observe(1.0, outcome(admitted=("A",)))
    rig.running = [
        Running(request_id=RequestId("A"), num_computed_tokens=1001, num_output_tokens=1)
    ]
    with_slack = rig.decide(1.5).token_budget
    on_pace = rig.decide(1 + 6).token_budget
    rig.running = []
    rig.policy.remove(RequestId("A"))
    alone = rig.decide(8.0).token_budget

    assert (with_slack, alone) == (2500, 2500)
    # The second token is due in 50 ms; 5 ms of each iteration do not depend on its tokens.
    assert on_pace == 450


def test_an_urgent_request_pauses_a_running_prefill_that_keeps_its_memory() -> None:
    rig = Rig()
    rig.start("batch", LATER, computed=500, prompt=20_000)
    rig.wait("chat", CHAT, prompt=2500)
    decision = rig.decide(0.0)

    assert decision.held == {"batch"}
    assert decision.preempted == frozenset()
    assert next(iter(decision.order)) == "chat"


def test_the_running_prefill_gets_the_budget_that_an_urgent_request_leaves() -> None:
    rig = Rig()
    rig.start("batch", LATER, computed=500, prompt=20_000)
    rig.wait("chat", CHAT, prompt=600)
    decision = rig.decide(0.0)

    assert decision.held == frozenset()
    # The engine serves the running request first; the cap leaves the chat's 600 tokens of the 2500.
    assert decision.per_request_cap == 1900
    assert decision.token_budget == 2500


def test_a_prefill_that_would_become_late_is_not_paused() -> None:
    """After an iteration of 0.25 s, 1.9 s are left and the prefill needs 1.73 s."""
    rig = Rig()
    rig.start("long", Slo(ttft_s=2.5, tbt_s=0.05), computed=7000, prompt=24_000)
    rig.wait("chat", Slo(ttft_s=1, tbt_s=0.05), prompt=2500)
    rests = "long" in rig.decide(0.0).held
    must_run = "long" not in rig.decide(0.6).held

    assert (rests, must_run) == (True, True)


def test_infeasible_requests_go_last() -> None:
    rig = Rig()
    rig.wait("late", Slo(ttft_s=0.01, tbt_s=0.05))
    rig.wait("dump", Slo())
    rig.wait("batch", LATER)

    assert rig.order(1.0) == ["batch", "late", "dump"]
    assert rig.policy.rank(RequestId("late")) is Rank.RELEGATED


def test_a_half_prefilled_relegated_request_frees_memory_for_regular_requests() -> None:
    rig = Rig()
    rig.start("late", Slo(ttlt_s=1), computed=5000, prompt=6000)
    rig.wait("batch", LATER, prompt=4000)
    rig.free_kv_tokens = 2000
    decision = rig.decide(2.0)

    assert decision.preempted == {"late"}
    assert next(iter(decision.order)) == "batch"


def test_a_half_prefilled_relegated_request_also_frees_its_slot() -> None:
    rig = Rig()
    rig.start("late", Slo(ttlt_s=1), computed=5000, prompt=6000)
    rig.wait("batch", LATER, prompt=4000)
    rig.max_running = 1
    decision = rig.decide(2.0)

    assert decision.preempted == {"late"}
    assert list(decision.order) == ["batch"]


def test_no_request_loses_memory_if_memory_suffices() -> None:
    rig = Rig()
    rig.start("late", Slo(ttlt_s=1), computed=5000, prompt=6000)
    rig.wait("batch", LATER, prompt=4000)
    decision = rig.decide(2.0)

    assert decision.preempted == frozenset()


def test_best_effort_work_uses_the_budget_that_other_work_leaves() -> None:
    rig = Rig()
    rig.wait("dump", Slo(), prompt=10_000)
    rig.wait("chat", CHAT, prompt=100, arrived_at=5.0)

    assert rig.order(5.0) == ["chat", "dump"]
    assert rig.decide(5.0).token_budget == 2500


def test_an_iteration_limit_holds_while_interactive_work_runs() -> None:
    """No iteration exceeds ConServe's TBT budget, even if requests have slack."""
    rig = Rig(replace(OPTIONS, iteration_limit_s=0.03))
    rig.start("chat", CHAT, computed=1001, outputs=1)
    rig.wait("dump", Slo(), prompt=10_000)

    assert rig.decide(0.5).token_budget == 250


def test_old_relegated_work_gets_a_share() -> None:
    rig = Rig(replace(OPTIONS, aged_share=2, aging_bound_s=60))
    rig.wait("late", Slo(ttft_s=0.01, tbt_s=0.05))
    for number in range(3):
        rig.wait(f"batch {number}", LATER, prompt=4000)
    heads = [rig.order(100.0)[0] for _ in range(4)]

    assert heads == ["batch 0", "late", "batch 0", "late"]


def test_old_work_that_does_not_fit_blocks_no_other_request() -> None:
    rig = Rig(replace(OPTIONS, aged_share=1, aging_bound_s=60))
    rig.wait("late", Slo(ttft_s=0.01, tbt_s=0.05), prompt=5000)
    rig.wait("batch", LATER, prompt=1000)
    rig.free_kv_tokens = 2000
    rig.order(1.0)

    assert rig.order(100.0) == ["batch"]


def test_a_preempted_request_waits_again_and_may_be_aborted() -> None:
    rig = Rig()
    rig.start("batch", LATER, computed=500)
    rig.policy.observe(0.0, outcome(preempted=("batch",)))
    rig.running = []
    again = rig.order()
    rig.policy.remove(RequestId("batch"))

    assert again == ["batch"]
    assert rig.order() == []


def test_a_request_may_be_aborted_while_it_is_offered() -> None:
    rig = Rig()
    rig.wait("a", SOON)
    rig.wait("b", LATER)
    decision = rig.decide(0.0)
    rig.policy.remove(RequestId("a"))
    rig.policy.observe(0.0, outcome())

    assert decision.token_budget == 2500
    assert rig.order() == ["b"]


@pytest.mark.parametrize(
    ("answer_tokens", "order"),
    [(1, ["short answers", "other"]), (None, ["other", "short answers"])],
)
def test_whole_answers_are_learned_and_aborted_ones_are_not(
    answer_tokens: int | None, order: list[str]
) -> None:
    """Prefill and answer are 1050 + 1 and 1000 + 100 tokens if the short answers are known."""
    rig = Rig()
    for number in range(10):
        rig.start(str(number), SOON, computed=1001, outputs=1, application="short")
        rig.running.clear()
        rig.policy.remove(RequestId(str(number)), answer_tokens)
    rig.wait("other", SOON, prompt=1000)
    rig.wait("short answers", SOON, prompt=1050, application="short")

    assert rig.order() == order


@pytest.mark.parametrize("name", ["edf", "dc", "dc+er", "qoserve", "qoserve+curve", "adaptive"])
def test_without_work_there_is_still_a_decision(name: str) -> None:
    decision = Rig(VARIANTS[name]).decide(0.0)

    assert (list(decision.order), decision.token_budget) == ([], 1)


def test_fairness_makes_a_much_served_tenant_wait_longer() -> None:
    options = replace(VARIANTS["combined"], fairness_weight=100.0)
    policy = QoServePolicy(LATENCY, options)

    def view(name: str, tenant: str) -> RequestView:
        return RequestView(
            request_id=RequestId(name), arrived_at=0.0, prompt_tokens=1000, max_tokens=10,
            slo=SOON, tenant=tenant,
        )  # fmt: skip

    batch = BatchState(
        running=(), num_waiting=0, max_running=8, max_budget_tokens=4096, free_kv_tokens=99_999
    )
    policy.add(view("first", "heavy"))
    assert list(policy.decide(0.0, batch).order) == ["first"]
    policy.observe(0.0, outcome(admitted=("first",)))
    policy.remove(RequestId("first"))
    policy.add(view("again", "heavy"))
    policy.add(view("new", "light"))

    assert list(policy.decide(1.0, batch).order) == ["new", "again"]


@pytest.mark.parametrize(("length", "rank"), [(40, Rank.REGULAR), (90, Rank.RELEGATED)])
def test_a_ttlt_request_is_relegated_if_its_mean_answer_would_be_late(
    length: int, rank: Rank
) -> None:
    """
    The deadline is 50 iterations away, which is enough for a mean of 40 tokens, although mean plus
    two deviations is 60, but not for a mean of 90.
    """
    rig = Rig()
    for number in range(20):
        answer = length + (10 if number % 2 else -10)
        rig.wait(f"past-{number}", SOON, prompt=10, application="summary")
        rig.policy.remove(RequestId(f"past-{number}"), answer)
    pace_s = rig.policy._pace.iteration_s
    rig.wait("new", Slo(ttlt_s=50 * pace_s), prompt=10, application="summary")
    rig.order()

    assert rig.policy.rank(RequestId("new")) is rank


@pytest.mark.parametrize(("cached", "rank"), [(900, Rank.REGULAR), (0, Rank.RELEGATED)])
def test_tokens_that_the_prefix_cache_is_expected_to_have_do_not_make_a_request_late(
    cached: int, rank: Rank
) -> None:
    """A prefill of 100,000 tokens takes 10 s; nine tenths of those before were in the cache."""
    rig = Rig()
    for number in range(20):
        name = RequestId(f"past-{number}")
        rig.wait(name, SOON, prompt=1000, application="agent")
        begun = replace(outcome(admitted=(name,)), cached_tokens={name: cached})
        rig.policy.observe(0.0, begun)
        rig.policy.remove(name)
    rig.wait("new", CHAT, prompt=100_000, application="agent")
    rig.order()

    assert rig.policy.rank(RequestId("new")) is rank


def test_a_request_that_resumes_does_not_count_as_cached() -> None:
    rig = Rig()
    for number in range(20):
        name = RequestId(f"past-{number}")
        rig.wait(name, SOON, prompt=1000, application="agent")
        rig.policy.observe(0.0, outcome(admitted=(name,)))
        rig.policy.observe(0.0, outcome(preempted=(name,)))
        again = replace(outcome(admitted=(name,)), cached_tokens={name: 1000})
        rig.policy.observe(0.0, again)
        rig.policy.remove(name)
    rig.wait("new", CHAT, prompt=100_000, application="agent")
    rig.order()

    assert rig.policy.rank(RequestId("new")) is Rank.RELEGATED
