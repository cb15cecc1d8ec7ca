"""Engine backend that runs the simulated engine in real time."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable

import msgspec
import structlog

from services.agent.backends.base import (
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    NewOutput,
    SchedulingParameters,
    capabilities_with,
)
from services.agent.backends.policies import create_policy
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.core import SimulatedEngineCore
from services.agent.backends.simulated.models import SimulatedModels
from services.agent.backends.simulated.safepoints import Passage, has_safepoints
from services.agent.backends.simulated.schedule import IterationResult
from services.agent.backends.token_engine import TokenEngine
from services.agent.backends.totals import EngineTotals
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import Capability, EngineIteration
from shared.runtime.clock import Clock
from solver.scheduling.engine.latency import LatencyTable

log = structlog.get_logger()

_MAX_ITERATIONS = 4096
_MAX_LAG_S = 0.1
"""
Maximum lag behind real time for which the engine compensates; the part of a lag above it is
ignored.
"""
_IDLE_S = 0.001


class SimulatedEngine(TokenEngine):
    """
    Engine backend whose engine computes no model.

    Answers are hashes of prompts.

    Differs from a real model: penalties, top-p and top-k are accepted and have no effect.
    """

    def __init__(
        self, entries: Iterable[ModelEntry], settings: SimulatedSettings, clock: Clock
    ) -> None:
        fitted = [_fitted(entry, settings) for entry in entries]
        self._models = SimulatedModels(fitted, settings)
        super().__init__(fitted, self._models.residency)
        self._settings = settings
        self._clock = clock
        self._core: SimulatedEngineCore | None = None
        self._passage = Passage(settings)
        self._ended = EngineTotals()
        """Totals of the models that were active before the current model."""
        self._limits = SchedulingParameters(
            token_budget=settings.token_budget, max_running=settings.max_running
        )
        self._iterations: deque[EngineIteration] = deque(maxlen=_MAX_ITERATIONS)
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> EngineIdentity:
        return EngineIdentity(
            engine="simulated",
            device="simulated",
            capabilities=capabilities_with(
                {
                    Capability.CALLS: True,
                    Capability.CHECKPOINT: self._settings.host_kv_tokens,
                    Capability.LAYER_PREEMPTION: has_safepoints(self._settings),
                }
            ),
        )

    async def prepare(self) -> None:
        """No-op: the simulated engine needs no preparation."""

    async def start(self) -> None:
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._serve(), name="simulated-engine")

    def add(self, entry: ModelEntry) -> None:
        fitted = _fitted(entry, self._settings)
        super().add(fitted)
        self._models.add(fitted)

    def replace(self, entry: ModelEntry) -> None:
        super().replace(_fitted(entry, self._settings))

    async def remove(self, model: ModelName) -> None:
        self._require_known(model)
        self._require_alive()
        is_active = model == self._residency.active
        self._forget(model)
        self._residency.remove(model)
        if is_active:
            self._ended = self._totals()
            self._core = None

    async def activate(self, model: ModelName) -> Seconds:
        entry = self._require_known(model)
        self._require_alive()
        activation = self._residency.activation(model)
        if activation is None:
            return 0.0
        if self._runs:
            raise EngineError(f"the model cannot change: {len(self._runs)} requests are running")
        self._residency.is_activating = True
        try:
            duration_s = await self._models.load(activation)
        finally:
            self._residency.is_activating = False
        self._require_alive()
        self._residency.activated(activation, duration_s)
        self._ended = self._totals()
        self._passage = Passage(self._settings)
        self._core = SimulatedEngineCore(
            entry,
            self._settings,
            create_policy(
                self._settings.policy,
                LatencyTable.from_coefficients(
                    self._settings.latency, max_tokens=self._settings.token_budget
                ),
                self._settings.scheduling,
            ),
            vocab_size=self._vocab_sizes[model],
        )
        self._apply_limits()
        return duration_s

    async def warm(self, model: ModelName) -> Seconds:
        self._require_known(model)
        self._require_alive()
        duration_s = await self._models.warm(model)
        self._require_alive()
        return duration_s

    async def cool(self, model: ModelName) -> None:
        self._require_known(model)
        self._models.cool(model)

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        self._limits = parameters
        self._apply_limits()

    async def clear_caches(self) -> None:
        self._require_alive()
        if self._core is not None:
            self._core.clear_caches()

    async def preempt_now(self) -> bool:
        if not has_safepoints(self._settings):
            raise UnsupportedError("engine.simulated has no safepoints with these settings")
        return self._passage.preempt()

    def snapshot(self) -> EngineSnapshot:
        core, totals = self._core, self._totals()
        return EngineSnapshot(
            model=self._residency.active,
            running=0 if core is None else core.num_running,
            waiting=0 if core is None else core.num_waiting,
            kv_utilization=0.0 if core is None else core.kv_utilization,
            kv_capacity_tokens=self._settings.kv_capacity_tokens,
            max_running=self._settings.max_running if core is None else core.max_running,
            models=self._residency.states(),
            warm_capacity_bytes=self._settings.warm_bytes,
            token_budget=0 if core is None else core.last_budget_tokens,
            scheduling=totals.scheduling,
            checkpoints=totals.checkpoints,
            host_kv_bytes=0 if core is None else core.memory.host.used_bytes,
            host_kv_capacity_bytes=0 if core is None else core.memory.host.capacity_bytes,
        )

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
        iterations = tuple(self._iterations)
        self._iterations.clear()
        return iterations

    @property
    def alive(self) -> bool:
        return self._loop_task is not None

    async def close(self) -> None:
        task = self._loop_task
        self._die()
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _run(self, request: EngineRequest) -> None:
        if self._settings.crash_on_token in request.prompt:
            self._die()
        core = self._core
        if core is None:
            raise EngineError("the engine died: injected fault", engine_dead=True)
        if len(request.prompt) > self._settings.kv_capacity_tokens:
            raise EngineError("the inputs together exceed the KV of the simulated engine")
        core.add(request)
        self._work.set()
        self._on_arrival(core, request)

    def _stop(self, request_id: RequestId) -> None:
        if self._core is not None:
            self._core.abort(request_id)

    def _on_arrival(self, core: SimulatedEngineCore, request: EngineRequest) -> None:
        if request.slo.qos_class is not QosClass.BEST_EFFORT:
            now = self._clock.now()
            due_at = request.slo.planning_deadline_at(request.arrived_at or now)
            prefills_s = core.online_prefills_s()
            self._passage.arrived(
                slack_s=due_at - now,
                prefill_s=prefills_s[request.request_id] - self._settings.latency.constant_s,
                online_s=sum(prefills_s.values()),
            )

    def _totals(self) -> EngineTotals:
        """Totals of the backend over all models that have been active so far."""
        if self._core is None:
            return self._ended
        scheduling = self._core.totals + self._passage.totals
        checkpoints = self._core.memory.host.totals
        return self._ended + EngineTotals(scheduling=scheduling, checkpoints=checkpoints)

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineError("the engine is not running", engine_dead=True)

    def _apply_limits(self) -> None:
        if self._core is not None:
            self._core.limit(
                token_budget=self._limits.token_budget, max_running=self._limits.max_running
            )

    def _die(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            self._loop_task = None
        self._ended = self._totals()
        self._core = None
        self._residency.clear()
        self._lose("the engine died while the request ran")

    async def _serve(self) -> None:
        try:
            await self._iterate_forever()
        except Exception:  # a bug here must look like a dead engine, not like a slow one
            log.exception("engine.died", engine="simulated")
            self._die()

    async def _iterate_forever(self) -> None:
        """
        Run iterations of the engine while there is work; each iteration lasts its simulated time.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            core = self._core
            if core is None or core.num_running + core.num_waiting == 0:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
                continue
            begun = core.begin(self._clock.now())
            begun_at = max(due, loop.time() - _MAX_LAG_S)
            if begun.parts:
                due = await self._passage.spend(begun, begun_at)
            else:
                due = begun_at + _IDLE_S * self._settings.time_scale
                await asyncio.sleep(max(0.0, due - loop.time()))
            result = core.finish(begun)
            if result.iteration is not None:
                self._iterations.append(result.iteration)
            self._deliver(core, result)

    def _deliver(self, core: SimulatedEngineCore, result: IterationResult) -> None:
        """
        Report the new tokens of an iteration; a request's first token ends its prefill.
        """
        now = self._clock.now()
        new = [
            NewOutput(
                each.request_id,
                EngineOutput(
                    token_ids=each.token_ids,
                    finish_reason=each.finish_reason,
                    cached_tokens=each.cached_tokens,
                    prefill_s=core.prefill_times.end(each.request_id, now) or 0.0,
                ),
            )
            for each in result.outputs
        ]
        self._report(new)


def _fitted(entry: ModelEntry, settings: SimulatedSettings) -> ModelEntry:
    """Limit the model length of *entry* to the engine's KV capacity."""
    room = settings.kv_capacity_tokens // settings.block_tokens * settings.block_tokens
    return msgspec.structs.replace(entry, max_model_len=min(entry.max_model_len, room))
