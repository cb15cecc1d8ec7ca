"""A replica that copies the KV of offline requests to the host as it grows (ConServe §4.4)."""

from ops.sim.limits import EngineLimits
from ops.sim.request import SimRequest
from ops.sim.safepoints import LayerwiseReplica, is_offline
from ops.sim.work import Work
from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.engine.decision import SchedulingPolicy
from solver.scheduling.engine.latency import LatencyTable

LINK_TOKENS_PER_S = 37e9 / (128 * 1024)
"""
Tokens whose KV is copied per second (ConServe §6.5): 37 GB/s each way, 128 KiB of KV per token.
"""


class CheckpointingReplica(LayerwiseReplica):
    """
    Replica with KV checkpoints: a preempted offline request resumes from its host copy instead of
    recomputing its KV.

    Source: ConServe §4.4, Fig. 5d: copies to the host overlap with the iterations that follow,
    copies to the device with iterations of other requests; the two directions are independent.
    Decided: KV of an iteration is copied during later iterations, as far as the link's bandwidth
    allows; a preemption loses KV that is not yet copied. A request resumes computing once its
    whole copy is on the device; copies are restored one after another.

    Args:
        link_tokens_per_s: KV tokens copied per second, each way.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        latency: LatencyTable,
        limits: EngineLimits,
        *,
        record: bool = False,
        patience: float = 1.0,
        link_tokens_per_s: float = LINK_TOKENS_PER_S,
    ) -> None:
        super().__init__(policy, latency, limits, record=record, patience=patience)
        self._link_tokens_per_s = link_tokens_per_s
        self._saved: dict[RequestId, int] = {}
        """Number of tokens with a host copy of each offline request that runs or waits."""
        self._loaded_at: dict[RequestId, UnixTime] = {}
        """Time at which the host copy of each running request is restored."""
        self._link_free_at: UnixTime = 0.0
        self._now: UnixTime = 0.0
        self.restored_tokens = 0

    def iterate(self, now: UnixTime) -> Seconds:
        self._now = now
        duration_s = super().iterate(now)
        if duration_s > 0:
            return duration_s
        coming = [at for at in self._loaded_at.values() if at > now]
        return min(coming) - now if coming else duration_s

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:
        duration_s, work = super()._compute(now, work)
        left = int(duration_s * self._link_tokens_per_s)
        for run in self._decodes + self._prefills:
            if left <= 0:
                break
            if is_offline(run):
                saved = self._saved.get(run.request_id, 0)
                copied = min(left, run.num_computed_tokens - saved)
                self._saved[run.request_id] = saved + copied
                left -= copied
        return duration_s, work

    def _preempt(self, run: SimRequest) -> None:
        super()._preempt(run)
        self._loaded_at.pop(run.request_id, None)
        run.num_computed_tokens = self._saved.get(run.request_id, 0)
        self.totals.wasted_tokens -= run.num_computed_tokens

    def _is_loading(self, run: SimRequest) -> bool:
        if run.num_computed_tokens and not run.blocks:
            self._link_free_at = max(self._now, self._link_free_at)
            self._link_free_at += run.num_computed_tokens / self._link_tokens_per_s
            self._loaded_at[run.request_id] = self._link_free_at
            self.restored_tokens += run.num_computed_tokens
        return self._loaded_at.get(run.request_id, 0.0) > self._now

    def _generate(self, run: SimRequest, now: UnixTime) -> bool:
        finished = super()._generate(run, now)
        if finished:
            self._saved.pop(run.request_id, None)
            self._loaded_at.pop(run.request_id, None)
        return finished
