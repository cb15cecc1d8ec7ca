"""A replica whose iterations an arriving online request can cut short (ConServe §4.3)."""

import math

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import SimRequest
from ops.sim.work import Work
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.decision import SchedulingPolicy
from solver.scheduling.latency import LatencyTable

SAFEPOINTS = 8
"""Every 4 of 32 layers (§6.5)."""
SAFEPOINT_S = 10e-6
"""Of one check on one GPU (§6.5: below 10 µs)."""


def is_offline(run: SimRequest) -> bool:
    """Whether it has no target."""
    return run.arrival.slo.qos_class is QosClass.BEST_EFFORT


class LayerwiseReplica(SimulatedReplica):
    """
    At the safepoint after an online arrival the offline part of the iteration is dropped.

    The remaining layers compute online work only. Nothing of the offline part counts: no token,
    no computed prompt; its KV blocks stay.

    Source: ConServe §4.3, algorithm 2: dropped only if the rest of the iteration and the
    waiting online prefills would take longer than the TTFT objective.
    Decided: each request's own TTFT target is the objective, counted from its arrival; waiting
    prefills are taken to have the part of each iteration that decodes leave.
    `patience` scales it; 0 drops at every online arrival.
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
        """Offline tokens that were in iterations cut short."""
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
        """The safepoint, 1 to `SAFEPOINTS`, at which offline work ends; the last is no cut."""
        online_s = 0.0
        for run in self._arrivals:
            arrived_at = run.arrival.arrived_at
            if arrived_at >= now + whole_s:
                break
            if is_offline(run):
                continue
            online_s = (online_s or self._waiting_s()) + self._prefill_s(run)
            left_s = now + whole_s - arrived_at
            ttft_s = run.arrival.slo.ttft_s or math.inf
            if left_s + online_s * self._stretch(whole_s, work) > self._patience * ttft_s:
                return max(1, math.ceil(SAFEPOINTS * (arrived_at - now) / whole_s))
        return SAFEPOINTS

    def _stretch(self, whole_s: Seconds, work: Work) -> float:
        """How much longer prefills take beside the decodes of an iteration like this."""
        if not work.prefills:
            return 1.0
        decodes_s = Work(work.decodes, []).duration_s(self._latency)
        return whole_s / (whole_s - decodes_s)

    def _waiting_s(self) -> Seconds:
        """Prefills of the online requests that wait already."""
        return sum(self._prefill_s(run) for run in self._waiting.values() if not is_offline(run))

    def _prefill_s(self, run: SimRequest) -> Seconds:
        tokens = run.num_prefill_tokens
        return self._latency.predict_s(tokens, tokens * tokens / 2, 0)
