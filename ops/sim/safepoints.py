"""A replica whose iterations an online request can preempt at a safepoint (ConServe §4.3)."""

import math

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import SimRequest
from ops.sim.work import Work
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.engine.decision import SchedulingPolicy
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.layer_preemption import RunningIteration, preempts

SAFEPOINTS = 8
"""Number of safepoints in an iteration: one for every 4 of 32 layers (ConServe §6.5)."""
SAFEPOINT_S = 10e-6
"""Duration of one safepoint's check on one GPU (ConServe §6.5: below 10 µs)."""


def is_offline(run: SimRequest) -> bool:
    """True if *run* has no target."""
    return run.arrival.slo.qos_class is QosClass.BEST_EFFORT


class LayerwiseReplica(SimulatedReplica):
    """
    Replica that drops the offline part of an iteration at the safepoint after an online arrival.

    The remaining layers compute online work only. Offline requests get no token and no computed
    prompt from the iteration, and keep their KV blocks.

    Source: ConServe §4.3; `solver.scheduling.engine.layer_preemption` makes the decision.
    Decided: the objective is each request's TTFT target, counted from its arrival and scaled by
    `patience`; 0 drops the offline part at every online arrival.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        latency: LatencyTable,
        limits: EngineLimits,
        *,
        record: bool = False,
        patience: float = 1.0,
    ) -> None:
        super().__init__(policy, latency, limits, record=record)
        self._patience = patience
        self.dropped_tokens = 0
        """Number of offline tokens dropped at safepoints."""
        self.num_cuts = 0

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:
        duration_s, work = super()._compute(now, work)
        if not duration_s:
            return duration_s, work
        whole_s = duration_s + SAFEPOINTS * SAFEPOINT_S
        layers_done = self._cut(now, whole_s, work)
        online = work.only(lambda run: not is_offline(run))
        if layers_done == SAFEPOINTS or online.tokens == work.tokens:
            return whole_s, work
        self.num_cuts += 1
        self.dropped_tokens += work.tokens - online.tokens
        left = 1 - layers_done / SAFEPOINTS
        checks_s = SAFEPOINTS * SAFEPOINT_S
        return whole_s * (1 - left) + left * (online.duration_s(self._latency) + checks_s), online

    def _cut(self, now: UnixTime, whole_s: Seconds, work: Work) -> int:
        """
        Number of the safepoint at which offline work is dropped, from 1; `SAFEPOINTS` means no
        preemption.
        """
        if not self._arrivals or self._arrivals[0].arrival.arrived_at >= now + whole_s:
            return SAFEPOINTS
        online_s = 0.0
        iteration = self._running_iteration(now, whole_s, work)
        for run in self._arrivals:
            arrived_at = run.arrival.arrived_at
            if arrived_at >= now + whole_s:
                break
            if is_offline(run):
                continue
            online_s = (online_s or self._waiting_s()) + self._prefill_s(run)
            slack_s = self._patience * (run.arrival.slo.ttft_s or math.inf)
            if preempts(iteration, now=arrived_at, online_s=online_s, slack_s=slack_s):
                return max(1, math.ceil(SAFEPOINTS * (arrived_at - now) / whole_s))
        return SAFEPOINTS

    def _running_iteration(self, now: UnixTime, whole_s: Seconds, work: Work) -> RunningIteration:
        decodes = Work(work.decodes, [])
        offline_tokens = work.tokens - work.only(lambda run: not is_offline(run)).tokens
        return RunningIteration(
            began_at=now,
            predicted_s=whole_s,
            decodes_s=decodes.duration_s(self._latency) if work.prefills else 0.0,
            online_tokens=work.tokens - offline_tokens,
            offline_tokens=offline_tokens,
        )

    def _waiting_s(self) -> Seconds:
        """Predicted prefill time of the waiting online requests."""
        return sum(self._prefill_s(run) for run in self._waiting.values() if not is_offline(run))

    def _prefill_s(self, run: SimRequest) -> Seconds:
        tokens = run.num_prefill_tokens
        return self._latency.predict_s(tokens, tokens * tokens / 2, 0)
