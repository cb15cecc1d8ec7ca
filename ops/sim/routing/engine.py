"""An instance behind the router: stock FCFS, chunked prefill, a prefix cache."""

from dataclasses import dataclass, field

import numpy as np

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import SimRequest
from ops.sim.routing.prefix_cache import PrefixCache
from ops.sim.routing.workload import RoutedArrival
from ops.sim.work import Work
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.routing import InstanceLoad
from solver.scheduling.baselines import FixedChunk
from solver.scheduling.engine.latency import LatencyTable

CHUNK_TOKENS = 2048
"""Default token budget of an iteration in vLLM."""
LIMITS = EngineLimits(max_running=128, max_budget_tokens=CHUNK_TOKENS, kv_capacity_tokens=100_000)
"""Approximate KV capacity of an engine with a 14B model on a 48 GB GPU."""
NOISE = 0.1
"""Standard deviation of the logarithm of an iteration's time."""


class RoutedSimRequest(SimRequest):
    """A simulated request of a tenant, with the router's data."""

    __slots__ = ("asked", "cached_tokens", "scheduled_at")

    def __init__(self, request_id: RequestId, asked: RoutedArrival) -> None:
        super().__init__(request_id, asked.arrival)
        self.asked = asked
        self.cached_tokens = 0
        """Number of tokens found in the engine's prefix cache when the request was added."""
        self.scheduled_at: UnixTime | None = None
        """Time at which the request's first chunk began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Period in which iterations take *factor* times as long."""

    factor: float = 1.0
    begins_at: UnixTime = 0.0
    ends_at: UnixTime = 0.0

    def at(self, now: UnixTime) -> float:
        """The slowdown factor at the time *now*."""
        return self.factor if self.begins_at <= now < self.ends_at else 1.0


NO_SLOWDOWN = Slowdown()


@dataclass(slots=True)
class Progress:
    """Requests that had their first or last token in an iteration."""

    first_tokens: list[RoutedSimRequest] = field(default_factory=list)
    finished: list[RoutedSimRequest] = field(default_factory=list)


class RoutedReplica(SimulatedReplica):
    """
    One engine with a prefix cache in free KV; *scale* multiplies the profile's times.

    Differs from vLLM: a prefix is looked up when the request reaches the engine, not when it is
    first scheduled, and each running request holds its own copy of a shared prefix.
    """

    def __init__(
        self,
        latency: LatencyTable,
        *,
        scale: float,
        slowdown: Slowdown,
        random: np.random.Generator,
        limits: EngineLimits = LIMITS,
        noise: float = NOISE,
    ) -> None:
        # Without a sort key, requests keep the order of arrival at the engine.
        super().__init__(FixedChunk(limits.max_budget_tokens, lambda _: ()), latency, limits)
        self._noise = noise
        self._scale = scale
        self._slowdown = slowdown
        self._random = random
        self.cache = PrefixCache()
        self._progress = Progress()
        self._num_reports = 0

    def add(self, request: SimRequest) -> None:
        assert isinstance(request, RoutedSimRequest)
        request.cached_tokens = self.cache.use(request.asked)
        request.num_computed_tokens = request.cached_tokens
        super().add(request)

    def taken_progress(self) -> Progress:
        """Return the progress of the latest iteration, and clear it."""
        progress, self._progress = self._progress, Progress()
        return progress

    def report(self, now: UnixTime) -> InstanceLoad:
        """Report the engine's load to routers."""
        self._num_reports += 1
        waiting = [*self._prefills, *self._waiting.values()]
        capacity = self._limits.kv_capacity_tokens // self._limits.block_tokens
        return InstanceLoad(
            seq=self._num_reports,
            at=now,
            running=len(self._decodes) + len(self._prefills),
            prefill_backlog_tokens=sum(
                run.num_prefill_tokens - run.num_computed_tokens for run in waiting
            ),
            kv_utilization=1 - self.free_blocks / capacity,
        )

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:
        for run, _ in work.prefills:
            assert isinstance(run, RoutedSimRequest)
            if run.scheduled_at is None:
                run.scheduled_at = now
        noise = float(np.exp(self._random.normal(0.0, self._noise)))
        factor = self._scale * self._slowdown.at(now) * noise
        return factor * work.duration_s(self._latency), work

    def _advance(self, now: UnixTime, work: Work) -> None:
        super()._advance(now, work)
        for run in [run for run, _ in work.prefills] + work.decodes:
            assert isinstance(run, RoutedSimRequest)
            if run.first_token_at == now:
                self._progress.first_tokens.append(run)
                self.cache.store(run.asked, run.arrival.prompt_tokens)
            if run.finished_at == now:
                self._progress.finished.append(run)
                self.cache.store(run.asked, run.arrival.prompt_tokens + run.num_output_tokens)
        self.cache.shrink(self.free_blocks * self._limits.block_tokens)
