"""The simulated engine in real time, as an engine backend."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import msgspec
import structlog

from services.agent.backends.base import (
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    SchedulingParameters,
)
from services.agent.backends.checks import check_request, finished_already, vocab_size_of
from services.agent.backends.policies import create_policy
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.core import SimulatedEngineCore
from services.agent.backends.simulated.identity import identity_of
from services.agent.backends.simulated.models import SimulatedModels
from services.agent.backends.simulated.outputs import deliver
from services.agent.backends.simulated.safepoints import Passage, has_safepoints
from services.agent.backends.stream import OutputStream
from services.agent.backends.totals import EngineTotals
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError, NotActiveError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import EngineIteration
from shared.runtime.clock import Clock
from solver.scheduling.latency import LatencyTable

log = structlog.get_logger()

_MAX_ITERATIONS = 4096
_MAX_LAG_S = 0.1
"""An engine that fell behind by more does not hurry to catch up."""
_IDLE_S = 0.001


class SimulatedEngine:
    """
    An engine backend that computes nothing.

    Answers are hashes of prompts. Differs from a real model: penalties, top-p and top-k are
    accepted and have no effect.

    Args:
        entries: Models that it can activate.
        settings: Timing, memory and faults.
        clock: What the scheduling policy compares deadlines with.
    """

    def __init__(
        self, entries: Iterable[ModelEntry], settings: SimulatedSettings, clock: Clock
    ) -> None:
        self._entries = {entry.name: _fitted(entry, settings) for entry in entries}
        self._settings = settings
        self._clock = clock
        self._models = SimulatedModels(self._entries.values(), settings)
        self._residency = self._models.residency
        self._is_activating = False
        self._core: SimulatedEngineCore | None = None
        self._passage = Passage(settings)
        self._ended = EngineTotals()
        """Of models that were active before."""
        self._vocab_size: int | None = None
        self._limits = SchedulingParameters(
            token_budget=settings.token_budget, max_running=settings.max_running
        )
        self._streams: dict[RequestId, OutputStream] = {}
        self._iterations: deque[EngineIteration] = deque(maxlen=_MAX_ITERATIONS)
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> EngineIdentity:
        return identity_of(self._settings)

    async def prepare(self) -> None:
        """Nothing takes time here."""

    async def start(self) -> None:
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._serve(), name="simulated-engine")

    async def activate(self, model: ModelName) -> Seconds:
        entry = self._require_known(model)
        self._require_alive()
        activation = self._residency.activation(model)
        if activation is None:
            return 0.0
        if self._streams:
            raise EngineError(f"{len(self._streams)} requests are running")
        self._is_activating = True
        try:
            duration_s = await self._models.load(activation)
        finally:
            self._is_activating = False
        self._require_alive()
        self._residency.activated(activation, duration_s)
        self._vocab_size = vocab_size_of(entry)
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
            vocab_size=self._vocab_size,
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

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        core = self._core
        if core is None or request.model != self._residency.active or self._is_activating:
            self._require_alive()
            raise NotActiveError(f"model {request.model!r} is not active")
        entry = self._entries[request.model]
        if reason := finished_already(entry, request):
            yield EngineOutput(token_ids=(), finish_reason=reason)
            return
        check_request(entry, request, self._vocab_size)
        if request.request_id in self._streams:
            raise EngineError(f"request {request.request_id} is running already")
        if self._settings.crash_on_token in request.prompt:
            self._die()
            raise EngineError("the engine died: injected fault", engine_dead=True)
        stream = self._streams[request.request_id] = OutputStream()
        core.add(request)
        self._work.set()
        self._on_arrival(core, request)
        try:
            async for output in stream.outputs():
                yield output
        finally:
            await self.abort(request.request_id)

    async def abort(self, request_id: RequestId) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.end()
            if self._core is not None:
                self._core.abort(request_id)

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

    def _require_known(self, model: ModelName) -> ModelEntry:
        entry = self._entries.get(model)
        if entry is None:
            raise EngineError(f"the engine has no model {model!r}")
        return entry

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
        """Of all models so far."""
        if self._core is None:
            return self._ended
        scheduling = replace(
            self._core.totals,
            layer_preemptions=self._passage.layer_preemptions,
            dropped_tokens=self._passage.dropped_tokens,
            yield_s=self._passage.yield_s,
        )
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
        for stream in self._streams.values():
            stream.fail(EngineError("the engine died under the request", engine_dead=True))
        self._streams.clear()

    async def _serve(self) -> None:
        try:
            await self._iterate_forever()
        except Exception:  # a bug in here must look like an engine's death, not like a slow one
            log.exception("engine.died", engine="simulated")
            self._die()

    async def _iterate_forever(self) -> None:
        """Iterate while there is work, each iteration as long as it says."""
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
            deliver(result.outputs, self._streams, core.prefill_times, self._clock.now())


def _fitted(entry: ModelEntry, settings: SimulatedSettings) -> ModelEntry:
    """*entry* with a length that the engine's memory can hold."""
    room = settings.kv_capacity_tokens // settings.block_tokens * settings.block_tokens
    return msgspec.structs.replace(entry, max_model_len=min(entry.max_model_len, room))
