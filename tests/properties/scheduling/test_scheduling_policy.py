"""Invariants of every scheduling policy, for arbitrary arrivals."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory, policy_names
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId, UnixTime
from shared.contracts.qos import Importance, QosClass, Slo
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
    SchedulingPolicy,
)
from solver.scheduling.engine.latency import LatencyTable
from tests.e2e.guides.guide_blocks import module_of

KV_TOKENS = 2048
TABLE = LatencyTable(
    tuple(0.004 + 0.002 * (-(-n // 64)) + 2e-5 * n for n in range(513)), 1e-8, 1e-7
)
LIMITS = EngineLimits(max_running=6, max_budget_tokens=512, kv_capacity_tokens=KV_TOKENS)
SLOS = (
    Slo(ttft_s=0.05, tbt_s=0.02),
    Slo(ttft_s=2, tbt_s=0.02),
    Slo(ttlt_s=0.2),
    Slo(ttlt_s=30),
    Slo(),
)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        arrived_at=st.floats(0, 2),
        prompt_tokens=st.integers(1, 1200),
        output_tokens=st.integers(1, 40),
        class_name=st.sampled_from(["a", "b"]),
        slo=st.sampled_from(SLOS),
        importance=st.sampled_from(Importance),
    ),
    min_size=1,
    max_size=25,
)


class Checked:
    """A policy whose decisions are checked against the rules."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._best_effort: set[str] = set()

    def add(self, request: RequestView) -> None:
        self._waiting.add(request.request_id)
        if request.slo.qos_class is QosClass.BEST_EFFORT:
            self._best_effort.add(request.request_id)
        self._policy.add(request)

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        self._waiting.discard(request_id)
        self._running.discard(request_id)
        self._policy.remove(request_id, answer_tokens)

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        self._waiting |= set(outcome.preempted)
        self._running -= set(outcome.preempted)
        self._waiting -= set(outcome.admitted)
        self._running |= set(outcome.admitted)
        self._policy.observe(now, outcome)

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        decision = self._policy.decide(now, batch)
        decodes = {run.request_id for run in batch.running if not run.is_prefill}
        kept_decodes = decodes - self._best_effort
        order = list(decision.order)
        assert decision.token_budget >= 1
        assert decision.per_request_cap is None or decision.per_request_cap >= 1
        assert not decision.held & decodes
        assert not decision.preempted & kept_decodes
        assert not decision.preempted & decision.held
        assert decision.held | decision.preempted <= self._running
        assert len(order) == len(set(order))
        assert set(order) <= self._waiting
        return IterationDecision(
            order=order,
            token_budget=decision.token_budget,
            per_request_cap=decision.per_request_cap,
            held=decision.held,
            preempted=decision.preempted,
        )


def run(
    policy: SchedulingPolicy, arrivals: Sequence[Arrival]
) -> tuple[SimulatedReplica, list[SimRequest]]:
    requests = [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate(sorted(arrivals, key=lambda a: a.arrived_at))
    ]
    replica = SimulatedReplica(policy, TABLE, LIMITS, record=True)
    replica.run(requests)
    return replica, requests


@pytest.mark.parametrize("name", policy_names())
@given(arrivals=ARRIVALS)
def test_all_work_ends_and_memory_is_free_again(name: str, arrivals: list[Arrival]) -> None:
    """All work ends, also relegated work, and no decision breaks a rule."""
    replica, requests = run(Checked(policy_factory(name)(TABLE)), arrivals)

    assert [r.num_output_tokens for r in requests] == [r.output_tokens for r in requests]
    assert replica.num_unfinished == 0
    assert replica.free_blocks == KV_TOKENS // LIMITS.block_tokens


OWN = module_of("own-policy", "aged_short")


@given(arrivals=ARRIVALS)
def test_policy_of_the_guide_keeps_the_same_rules(arrivals: list[Arrival]) -> None:
    (first, requests), (second, _) = (
        run(Checked(OWN.AgedShort(TABLE)), arrivals) for _ in range(2)
    )

    assert [r.num_output_tokens for r in requests] == [r.output_tokens for r in requests]
    assert first.free_blocks == KV_TOKENS // LIMITS.block_tokens
    assert first.totals.steps == second.totals.steps


@given(arrivals=ARRIVALS)
def test_equal_arrivals_give_equal_iterations(arrivals: list[Arrival]) -> None:
    first, second = (run(policy_factory("adaptive")(TABLE), arrivals)[0] for _ in range(2))

    assert first.totals.steps == second.totals.steps


@given(arrivals=ARRIVALS)
def test_iterations_are_within_the_least_slack(arrivals: list[Arrival]) -> None:
    """No prefill makes a decode late that still has slack."""
    policy = policy_factory("qoserve")(TABLE)
    requests = [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate(sorted(arrivals, key=lambda a: a.arrived_at))
    ]
    replica = SimulatedReplica(policy, TABLE, LIMITS)
    now = 2.0
    for request in requests:
        replica.add(request)
    while replica.num_unfinished:
        in_time = [r for r in requests if _is_in_time(r)]
        decodes = [r for r in requests if not r.is_prefill and r.finished_at is None]
        slack_s = min(
            (r.deadline_at + r.num_output_tokens * r.tbt_s - now for r in in_time), default=inf
        )
        context = sum(r.num_computed_tokens for r in decodes)
        alone_s = TABLE.predict_s(len(decodes), 0, context)
        duration_s = replica.iterate(now)
        assert duration_s <= max(slack_s, alone_s) + 1e-9 or slack_s <= 0
        now += duration_s


def _is_in_time(request: SimRequest) -> bool:
    """True if the request is interactive, decodes, and had its first token in time."""
    return (
        request.interactive
        and not request.is_prefill
        and request.finished_at is None
        and request.first_token_at is not None
        and request.first_token_at <= request.deadline_at
    )
