"""Online and offline work in one engine, for arbitrary arrivals."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.sim.checkpoints import CheckpointingReplica
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.request import Arrival, SimRequest
from ops.sim.safepoints import LayerwiseReplica, is_offline
from ops.sim.work import Work
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.qos import Slo
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
    SchedulingPolicy,
)
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import VARIANTS

KV_TOKENS = 2048
TABLE = LatencyTable(
    tuple(0.004 + 0.002 * (-(-n // 64)) + 2e-5 * n for n in range(513)), 1e-8, 1e-7
)
LIMITS = EngineLimits(max_running=6, max_budget_tokens=512, kv_capacity_tokens=KV_TOKENS)
TBT_S = 0.02
CHAT = Slo(ttft_s=0.2, tbt_s=TBT_S)
OURS = ("conserve", "conserve+admission")
CO_SERVING = (*OURS, "sarathi-preemptive:128", "non-preemptive:128")


def arrivals_of(slo: Slo) -> st.SearchStrategy[list[Arrival]]:
    return st.lists(
        st.builds(
            Arrival,
            arrived_at=st.floats(0, 2),
            prompt_tokens=st.integers(1, 900),
            output_tokens=st.integers(1, 40),
            class_name=st.just("*"),
            slo=st.just(slo),
        ),
        max_size=10,
    )


ARRIVALS = st.tuples(arrivals_of(CHAT), arrivals_of(Slo())).map(lambda both: both[0] + both[1])
Build = Callable[[SchedulingPolicy], SimulatedReplica]
REPLICAS: dict[str, Build] = {
    "plain": lambda policy: SimulatedReplica(policy, TABLE, LIMITS),
    "layers": lambda policy: LayerwiseReplica(policy, TABLE, LIMITS, patience=0.0),
    "checkpoints": lambda policy: CheckpointingReplica(
        policy, TABLE, LIMITS, patience=0.0, link_tokens_per_s=20_000
    ),
}


def requests_of(arrivals: Sequence[Arrival]) -> list[SimRequest]:
    return [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate(sorted(arrivals, key=lambda a: a.arrived_at))
    ]


@pytest.mark.parametrize("kind", REPLICAS)
@pytest.mark.parametrize("name", CO_SERVING)
@settings(deadline=None)
@given(arrivals=ARRIVALS)
def test_offline_work_ends_after_online_work_and_tokens_add_up(
    name: str, kind: str, arrivals: list[Arrival]
) -> None:
    """The number of computed tokens is the number of needed tokens plus that of lost tokens."""
    requests = requests_of(arrivals)
    replica = REPLICAS[kind](policy_factory(name)(TABLE))
    replica.run(requests)
    needed = sum(r.arrival.prompt_tokens + r.output_tokens - 1 for r in requests)

    assert [r.num_output_tokens for r in requests] == [r.output_tokens for r in requests]
    assert replica.free_blocks == KV_TOKENS // LIMITS.block_tokens
    assert replica.totals.tokens == needed + replica.totals.wasted_tokens
    assert replica.totals.wasted_tokens >= 0


@pytest.mark.parametrize("name", OURS)
@settings(deadline=None)
@given(arrivals=ARRIVALS)
def test_iterations_beside_online_decodes_keep_their_pace(
    name: str, arrivals: list[Arrival]
) -> None:
    """
    An iteration exceeds its limit only if its decodes alone do, because they cannot be omitted.
    """
    requests = requests_of(arrivals)
    replica = SimulatedReplica(policy_factory(name)(TABLE), TABLE, LIMITS)
    limit_s = TBT_S * (1 - VARIANTS[name].latency_margin)
    now = 2.0
    for request in requests:
        replica.add(request)
    while replica.num_unfinished:
        decodes = [r for r in requests if not r.is_prefill and r.finished_at is None]
        alone_s = TABLE.predict_s(len(decodes), 0, sum(r.num_computed_tokens for r in decodes))
        duration_s = replica.iterate(now)
        if any(r.interactive for r in decodes):
            assert duration_s <= max(limit_s, alone_s) + 1e-9
        now += duration_s


class Witness:
    """Assert that offline work begins only outside the reserve."""

    def __init__(self) -> None:
        self._policy = policy_factory("conserve+admission")(TABLE)
        self._offline: set[RequestId] = set()
        self._reserve_tokens = 0
        self.replica: SimulatedReplica | None = None
        self.remove = self._policy.remove

    def add(self, request: RequestView) -> None:
        if request.slo == Slo():
            self._offline.add(request.request_id)
        self._policy.add(request)

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        admitted = set(outcome.admitted)
        if admitted and admitted <= self._offline:
            assert self.replica is not None
            assert self.replica.free_blocks * LIMITS.block_tokens >= self._reserve_tokens
        self._policy.observe(now, outcome)

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        capacity = batch.free_kv_tokens + sum(run.num_computed_tokens for run in batch.running)
        share = VARIANTS["conserve+admission"].best_effort_kv_reserve
        self._reserve_tokens = int(share * capacity) if batch.running else 0
        return self._policy.decide(now, batch)


@settings(deadline=None)
@given(arrivals=ARRIVALS)
def test_offline_work_never_begins_in_the_kv_reserve(arrivals: list[Arrival]) -> None:
    witness = Witness()
    witness.replica = SimulatedReplica(witness, TABLE, LIMITS)
    witness.replica.run(requests_of(arrivals))


class Cutting(LayerwiseReplica):
    """Assert that each online request of a cut iteration still gets its token."""

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:
        duration_s, done = super()._compute(now, work)
        online = work.only(lambda run: not is_offline(run))
        kept = done.only(lambda run: not is_offline(run))
        whole_s = work.duration_s(TABLE) + 8 * 10e-6
        assert (kept.decodes, kept.prefills) == (online.decodes, online.prefills)
        assert done.tokens in (work.tokens, online.tokens)
        assert duration_s <= whole_s + 1e-9
        return duration_s, done


@settings(deadline=None)
@given(arrivals=ARRIVALS)
def test_a_cut_iteration_delivers_all_tokens_of_online_requests(arrivals: list[Arrival]) -> None:
    requests = requests_of(arrivals)
    Cutting(policy_factory("conserve")(TABLE), TABLE, LIMITS, patience=0.0).run(requests)

    assert all(r.finished_at is not None for r in requests)
