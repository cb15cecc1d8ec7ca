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
from services.agent.backends.residency import ResidencyTable
from services.agent.backends.settings import DEFAULT_ACTIVATION_S, VllmSettings
from services.agent.backends.stream import OutputStream
from services.agent.backends.vllm.arguments import engine_arguments
from services.agent.backends.vllm.availability import vllm_unavailable_reason
from services.agent.backends.vllm.link import HostLink
from services.agent.backends.vllm.qos import submission
from services.agent.backends.vllm.telemetry import EngineTelemetry
from services.agent.backends.vllm.wire import (
    Abort,
    Activate,
    Activated,
    ActivationFailed,
    EngineDied,
    HostEvent,
    HostReady,
    Outputs,
    RunFailed,
)
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import Iteration, Residency

log = structlog.get_logger()

_FINISHES = frozenset({"", *(reason.value for reason in FinishReason)})
"""What ends an answer well; vLLM also knows `abort`, `error` and `repetition`."""
_CAPABILITIES = frozenset({Capability.MODEL_SWAP, Capability.SCHEDULING, Capability.TELEMETRY})


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
        self._residency = ResidencyTable(
            self._entries,
            capacity=settings.max_resident_engines,
            prior_s={Residency.WARM: 0.0, Residency.COLD: DEFAULT_ACTIVATION_S},
        )
        self._launching = asyncio.Lock()
        self._link: HostLink | None = None
        self._host: HostReady | None = None
        self._alive = False
        self._activation: asyncio.Future[None] | None = None
        self._streams: dict[RequestId, OutputStream] = {}
        self._telemetry = EngineTelemetry()

    @property
    def identity(self) -> EngineIdentity:
        """Version and device are known once started."""
        if self._host is None:
            return EngineIdentity(engine="vllm", device="unknown", capabilities=_CAPABILITIES)
        version = self._host.version.partition("+")[0]  # without the build
        return EngineIdentity(
            engine=f"vllm-{version}", device=self._host.device, capabilities=_CAPABILITIES
        )

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
        if not self._host.is_cpu and self._settings.kv_cache_bytes is None:
            # An engine that sizes its KV by itself takes the whole GPU.
            self._residency.limit(1)
        self._alive = True
        log.info("engine.started", duration_s=round(time.monotonic() - begun, 3))

    async def activate(self, model: ModelName) -> Seconds:
        entry = self._entries.get(model)
        if entry is None:
            raise EngineError(f"the engine has no model {model!r}")
        link = self._require_alive()
        if model == self._residency.active:
            return 0.0
        if self._streams or self._activation is not None:
            raise EngineError("requests are running, or another model is being activated")
        source = self._residency.residency(model)
        begun = time.monotonic()
        victims = self._residency.victims(model)
        self._forget(victims)
        if source is Residency.COLD:
            self._telemetry.open(model)
        arguments = engine_arguments(
            entry,
            self._settings,
            is_cpu=self._host is None or self._host.is_cpu,
            stats_path=self._telemetry.path(model),
        )
        link.send(Activate(model, arguments, victims))
        self._activation = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._settings.activate_timeout_s):
                await self._activation
        except TimeoutError:
            link.kill()
            raise EngineError(
                f"{model} was not active within {self._settings.activate_timeout_s} s",
                engine_dead=True,
            ) from None
        finally:
            self._activation = None
        duration_s = time.monotonic() - begun
        self._residency.activated(model, source, duration_s)
        self._telemetry.limit(model)
        return duration_s

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        if request.model != self._residency.active or self._activation is not None:
            self._require_alive()
            raise EngineError(f"model {request.model!r} is not active")
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
        try:
            async for output in stream.outputs():
                yield output
        finally:
            self._leave(request.request_id, stream)

    async def abort(self, request_id: RequestId) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._leave(request_id, stream)

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        self._telemetry.limit(self._residency.active, parameters)

    def snapshot(self) -> EngineSnapshot:
        load = self._telemetry.load(self._residency.active)
        running = min(load.running, len(self._streams))
        return EngineSnapshot(
            model=self._residency.active,
            running=running,
            waiting=len(self._streams) - running,
            kv_utilization=load.kv_utilization,
            kv_capacity_tokens=load.kv_capacity_tokens,
            max_running=self._telemetry.max_running(self._settings.max_running),
            models=self._residency.states(),
            token_budget=load.token_budget,
            scheduling=load.scheduling,
        )

    def drain_iterations(self) -> tuple[Iteration, ...]:
        return self._telemetry.drain(self._residency.active)

    @property
    def alive(self) -> bool:
        return self._alive

    async def close(self) -> None:
        self._end("the engine was closed")
        async with self._launching:
            link, self._link = self._link, None
        if link is not None:
            await link.close()
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

    def _forget(self, models: tuple[ModelName, ...]) -> None:
        """The engines of *models* are gone."""
        self._residency.drop(models)
        self._telemetry.forget(models)

    def _on_event(self, event: HostEvent) -> None:
        match event:
            case Outputs():
                self._on_outputs(event)
            case RunFailed():
                stream = self._streams.get(RequestId(event.request_id))
                if stream is not None:
                    stream.fail(EngineError(event.message))
            case Activated():
                self._end_activation(None)
            case ActivationFailed():
                self._end_activation(EngineError(f"cannot load {event.model}: {event.message}"))
            case EngineDied():
                self._on_engine_died(event)
            case HostReady():
                pass

    def _on_outputs(self, event: Outputs) -> None:
        for run in event.runs:
            stream = self._streams.get(RequestId(run.request_id))
            if stream is not None and run.finish not in _FINISHES:
                stream.fail(EngineError(f"the engine ended the run: {run.finish}"))
            elif stream is not None:
                stream.push(
                    run.token_ids,
                    FinishReason(run.finish) if run.finish else None,
                    cached_tokens=run.cached_tokens,
                )

    def _end_activation(self, error: EngineError | None) -> None:
        if self._activation is not None and not self._activation.done():
            if error is None:
                self._activation.set_result(None)
            else:
                self._activation.set_exception(error)

    def _on_engine_died(self, event: EngineDied) -> None:
        model = ModelName(event.model)
        log.error("engine.died", model=model, reason=event.message)
        was_active = model == self._residency.active
        self._forget((model,))
        if was_active:
            self._alive = False
            self._fail_streams(event.message)

    def _on_lost(self, message: str) -> None:
        log.error("engine.died", reason=message)
        self._link = None
        self._end(message)

    def _end(self, message: str) -> None:
        self._alive = False
        self._forget(tuple(self._entries))
        self._end_activation(EngineError(message, engine_dead=True))
        self._fail_streams(message)

    def _fail_streams(self, message: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineError(message, engine_dead=True))
        self._streams.clear()
