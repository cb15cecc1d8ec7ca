"""vLLM as an engine backend: the side that lives in the agent and never imports vLLM."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import structlog

from services.agent.backends.base import (
    Capability,
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    SchedulingParameters,
)
from services.agent.backends.checks import (
    check_request,
    finished_already,
    stop_tokens,
    vocab_size_of,
)
from services.agent.backends.settings import VllmSettings
from services.agent.backends.stream import OutputStream
from services.agent.backends.vllm.availability import vllm_unavailable_reason
from services.agent.backends.vllm.identity import identity_of
from services.agent.backends.vllm.link import HostLink
from services.agent.backends.vllm.models import EngineModels
from services.agent.backends.vllm.outputs import deliver
from services.agent.backends.vllm.qos import submission
from services.agent.backends.vllm.reply import Reply
from services.agent.backends.vllm.telemetry import EngineTelemetry
from services.agent.backends.vllm.wire import (
    Abort,
    Activated,
    ActivationFailed,
    CachesCleared,
    ClearCaches,
    EngineDied,
    HostEvent,
    HostReady,
    Outputs,
    RunFailed,
)
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError, NotActiveError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import EngineIteration

log = structlog.get_logger()


class VllmEngine:
    """
    vLLM engines in a host process, one of them active and others parked.

    Args:
        entries: Models that it can activate.
        settings: Of the host and its engines.
    """

    def __init__(self, entries: Iterable[ModelEntry], settings: VllmSettings) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._vocab_sizes = {name: vocab_size_of(entry) for name, entry in self._entries.items()}
        self._settings = settings
        self._launching = asyncio.Lock()
        self._link: HostLink | None = None
        self._host: HostReady | None = None
        self._alive = False
        self._clearing = Reply()
        self._clear_lock = asyncio.Lock()
        self._streams: dict[RequestId, OutputStream] = {}
        self._telemetry = EngineTelemetry()
        self._models = EngineModels(self._entries.values(), settings, self._telemetry)

    @property
    def identity(self) -> EngineIdentity:
        return identity_of(self._settings, self._host)

    @property
    def host_pid(self) -> int | None:
        """The engine host's; its engines are in the process group of the same id."""
        return None if self._link is None else self._link.pid

    async def prepare(self) -> None:
        async with self._launching:
            if self._link is not None:
                return
            reason = vllm_unavailable_reason() if self._settings.python is None else None
            if reason is not None:
                raise EngineError(reason)
            self._link = await HostLink.launch(
                self._settings,
                architectures=[entry.architecture for entry in self._entries.values()],
                scratch=self._telemetry.directory(),
                on_event=self._on_event,
                on_lost=self._on_lost,
            )

    async def start(self) -> None:
        begun = time.monotonic()
        await self.prepare()
        if self._link is None:
            raise EngineError("the engine host ended before it was ready", engine_dead=True)
        self._host = await self._link.ready()
        self._models.on_host(is_cpu=self._host.is_cpu)
        self._alive = True
        log.info("engine.started", duration_s=round(time.monotonic() - begun, 3))

    async def activate(self, model: ModelName) -> Seconds:
        self._require_known(model)
        link = self._require_alive()
        if model == self._models.residency.active and not self._models.is_activating:
            return 0.0
        if self._streams:
            raise EngineError("requests are running")
        if self._models.is_loading:
            raise EngineError("another model is being loaded")
        return await self._models.activate(model, link)

    async def warm(self, model: ModelName) -> Seconds:
        self._require_known(model)
        link = self._require_alive()
        if self._models.is_loading:
            raise EngineError("another model is being loaded")
        return await self._models.warm(model, link)

    async def cool(self, model: ModelName) -> None:
        self._require_known(model)
        self._models.cool(model, self._require_alive())

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        if request.model != self._models.residency.active or self._models.is_activating:
            self._require_alive()
            raise NotActiveError(f"model {request.model!r} is not active")
        link = self._require_alive()
        entry = self._entries[request.model]
        if reason := finished_already(entry, request):
            yield EngineOutput(token_ids=(), finish_reason=reason)
            return
        check_request(entry, request, self._vocab_sizes[request.model])
        if request.request_id in self._streams:
            raise EngineError(f"request {request.request_id} is running already")
        stream = self._streams[request.request_id] = OutputStream()
        link.send(submission(request, stop_tokens(entry, request)))
        self._telemetry.arrived(request)
        try:
            async for output in stream.outputs():
                self._telemetry.answered(request)
                yield output
        finally:
            self._telemetry.answered(request)
            self._leave(request.request_id, stream)

    async def abort(self, request_id: RequestId) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._leave(request_id, stream)

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        self._telemetry.limit(self._models.residency.active, parameters)

    async def clear_caches(self) -> None:
        async with self._clear_lock:
            self._require_alive().send(ClearCaches())
            timeout_s = self._settings.activate_timeout_s
            try:
                await self._clearing.wait(timeout_s)
            except TimeoutError:
                raise EngineError(f"caches were not cleared within {timeout_s} s") from None

    async def preempt_now(self) -> bool:
        if Capability.LAYER_PREEMPTION not in self.identity.capabilities:
            raise UnsupportedError("engine.vllm has no safepoints with these settings")
        return self._telemetry.preempt(self._models.residency.active)

    def yields_s(self, since: int = 0) -> list[Seconds]:
        """Demand to safepoint, of the active engine's latest layer preemptions from *since* on."""
        return self._telemetry.yields_s(self._models.residency.active, since)

    def snapshot(self) -> EngineSnapshot:
        load = self._telemetry.load(self._models.residency.active)
        running = min(load.running, len(self._streams))
        return EngineSnapshot(
            model=self._models.residency.active,
            running=running,
            waiting=len(self._streams) - running,
            kv_utilization=load.kv_utilization,
            kv_capacity_tokens=load.kv_capacity_tokens,
            max_running=self._telemetry.max_running(self._settings.max_running),
            models=self._models.residency.states(),
            warm_capacity_bytes=self._settings.warm_bytes,
            token_budget=load.token_budget,
            scheduling=load.scheduling,
            checkpoints=load.checkpoints,
            host_kv_bytes=load.host_kv_bytes,
            host_kv_capacity_bytes=load.host_kv_capacity_bytes,
        )

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
        return self._telemetry.drain(self._models.residency.active)

    @property
    def alive(self) -> bool:
        return self._alive

    async def close(self) -> None:
        self._end("the engine was closed")
        async with self._launching:
            link, self._link = self._link, None
        if link is not None:
            await link.close()
        self._models.close()
        self._telemetry.close()

    def _require_alive(self) -> HostLink:
        if self._link is None or not self._alive:
            raise EngineError("the engine is not running", engine_dead=True)
        return self._link

    def _leave(self, request_id: RequestId, stream: OutputStream) -> None:
        """The run has ended, or is to end now."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if not stream.ended and self._link is not None:
                self._link.send(Abort(request_id))
            stream.end()

    def _require_known(self, model: ModelName) -> None:
        if model not in self._entries:
            raise EngineError(f"the engine has no model {model!r}")

    def _on_event(self, event: HostEvent) -> None:
        match event:
            case Outputs():
                self._on_outputs(event)
            case RunFailed():
                stream = self._streams.get(RequestId(event.request_id))
                if stream is not None:
                    stream.fail(EngineError(event.message))
            case Activated() | ActivationFailed():
                self._models.on_event(event)
            case CachesCleared():
                self._clearing.end(EngineError(event.message) if event.message else None)
            case EngineDied():
                self._on_engine_died(event)
            case HostReady():
                pass

    def _on_outputs(self, event: Outputs) -> None:
        for run in event.runs:
            stream = self._streams.get(RequestId(run.request_id))
            if stream is not None:
                deliver(run, stream)

    def _on_engine_died(self, event: EngineDied) -> None:
        model = ModelName(event.model)
        log.error("engine.died", model=model, reason=event.message)
        was_active = model == self._models.residency.active
        self._models.lose_engine(model)
        if was_active:
            self._alive = False
            self._fail_streams(event.message)

    def _on_lost(self, message: str) -> None:
        log.error("engine.died", reason=message)
        self._link = None
        self._end(message)

    def _end(self, message: str) -> None:
        self._alive = False
        self._models.lose_engines(message)
        self._clearing.end(EngineError(message, engine_dead=True))
        self._fail_streams(message)

    def _fail_streams(self, message: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineError(message, engine_dead=True))
        self._streams.clear()
