"""The front of the vLLM backend: runs in the agent and never imports vLLM."""

import asyncio
import time
from collections.abc import Collection, Iterable

import structlog

from services.agent.backends.answering import AnsweringBackend
from services.agent.backends.base import (
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    NewOutput,
    SchedulingParameters,
    capabilities_with,
)
from services.agent.backends.checks import stop_tokens
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.arguments import has_checkpoints, safepoint_layers
from services.agent.backends.vllm.front.device_defaults import CPU_MAX_RUNNING
from services.agent.backends.vllm.front.link import HostLink
from services.agent.backends.vllm.front.models import EngineModels
from services.agent.backends.vllm.front.parallel import device_name, num_devices
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.agent.backends.vllm.front.run_events import events_of
from services.agent.backends.vllm.front.telemetry import EngineTelemetry
from services.agent.backends.vllm.shared.core_ids import answer_run
from services.agent.backends.vllm.shared.wire import (
    Abort,
    ClearCaches,
    EngineChoices,
    EngineDied,
    HostEvent,
    HostReady,
    Models,
    Submit,
)
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Capability, EngineIteration

log = structlog.get_logger()


class VllmEngine(AnsweringBackend):
    """
    vLLM engines in a host process: one is active, the others are parked.

    Args:
        entries: Models that can be activated.
        settings: Settings of the host and its engines.
    """

    def __init__(self, entries: Iterable[ModelEntry], settings: VllmSettings) -> None:
        entries = tuple(entries)
        self._telemetry = EngineTelemetry()
        self._models = EngineModels(entries, settings, self._telemetry)
        super().__init__(entries, self._models.residency)
        self._settings = settings
        # Those of a start: the key of the instance's profiles must not change while it serves.
        self._started_with = entries
        self._launching = asyncio.Lock()
        self._link: HostLink | None = None
        self._host: HostReady | None = None
        self._alive = False
        self._clear_lock = asyncio.Lock()

    @property
    def identity(self) -> EngineIdentity:
        return identity_of(self._settings, self._host, self._started_with)

    @property
    def choices(self) -> EngineChoices | None:
        """Configuration of the active model's engine; None if no model is active."""
        active = self._residency.active
        return None if active is None else self._models.choices.get(active)

    @property
    def host_pid(self) -> int | None:
        """Process id of the engine host; its engines are in the process group of the same id."""
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
        self._link.send(Models(tuple(self._entries.values())))
        self._alive = True
        log.info("engine.started", duration_s=round(time.monotonic() - begun, 3))

    def add(self, entry: ModelEntry) -> None:
        super().add(entry)
        self._models.add(entry)
        if self._alive and self._link is not None:
            self._link.send(Models((entry,)))

    def replace(self, entry: ModelEntry) -> None:
        if self._models.lacks_room(entry):
            if entry.name == self._residency.active or entry.name in self._models.loading:
                raise EngineError(
                    f"the engine of {entry.name} was started without room for adapters; it gets "
                    "room when it is started again, or with max_adapters of the model"
                )
            self._models.cool(entry.name, self._require_alive())
        super().replace(entry)
        self._models.replace(entry)
        if self._alive and self._link is not None:
            self._link.send(Models((entry,)))

    async def remove(self, model: ModelName) -> None:
        self._require_known(model)
        link = self._require_alive()
        if model in self._models.loading or self._residency.is_activating:
            raise EngineError("a model is being loaded")
        self._forget(model)
        self._models.remove(model, link)

    async def activate(self, model: ModelName) -> Seconds:
        self._require_known(model)
        link = self._require_alive()
        if model == self._residency.active and not self._residency.is_activating:
            return 0.0
        if self._runs:
            raise EngineError("requests are running")
        if self._models.loading:
            raise EngineError("another model is being loaded")
        return await self._models.activate(model, link)

    async def warm(self, model: ModelName) -> Seconds:
        self._require_known(model)
        link = self._require_alive()
        if self._models.loading:
            raise EngineError("another model is being loaded")
        return await self._models.warm(model, link)

    async def cool(self, model: ModelName) -> None:
        self._require_known(model)
        self._models.cool(model, self._require_alive())

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        self._telemetry.limit(self._residency.active, parameters)

    async def clear_caches(self) -> None:
        async with self._clear_lock:
            timeout_s = self._settings.activate_timeout_s
            try:
                await self._require_alive().ask(ClearCaches(), timeout_s)
            except TimeoutError:
                raise EngineError(f"caches were not cleared within {timeout_s} s") from None

    async def preempt_now(self) -> bool:
        if Capability.LAYER_PREEMPTION not in self.identity.capabilities:
            raise UnsupportedError("engine.vllm has no safepoints with these settings")
        monitor = self._telemetry.monitor(self._residency.active)
        return monitor is not None and monitor.preempt()

    def snapshot(self) -> EngineSnapshot:
        load = self._telemetry.load(self._residency.active)
        running = min(load.running, len(self._runs))
        return EngineSnapshot(
            model=self._residency.active,
            running=running,
            waiting=len(self._runs) - running,
            kv_utilization=load.kv_utilization,
            kv_capacity_tokens=load.kv_capacity_tokens,
            max_running=self._telemetry.max_running(
                load.max_running or self._settings.max_running or CPU_MAX_RUNNING
            ),
            models=self._residency.states(),
            warm_capacity_bytes=self._residency.warm_bytes,
            token_budget=load.token_budget,
            scheduling=load.scheduling,
            checkpoints=load.checkpoints,
            host_kv_bytes=load.host_kv_bytes,
            host_kv_capacity_bytes=load.host_kv_capacity_bytes,
        )

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
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
        self._models.close()
        self._telemetry.close()

    def _require_alive(self) -> HostLink:
        if self._link is None or not self._alive:
            raise EngineError("the engine is not running", engine_dead=True)
        return self._link

    def _submit(self, request: EngineRequest) -> None:
        stops = stop_tokens(self._entries[request.model], request)
        adapters = self._adapters[request.model]
        path = "" if request.adapter is None else adapters[request.adapter]
        self._require_alive().send(Submit(request, stops, path))
        if request.call is None:  # the lengths of a call's prompts are not known yet
            num_tokens = len(request.prompt) + len(request.progress)
            self._arrived(request, request.request_id, num_tokens)

    def _arrived(self, request: EngineRequest, run: RequestId, num_tokens: int) -> None:
        monitor = self._telemetry.monitor(request.model)
        if monitor is not None:
            monitor.arrived(request, run, num_tokens)

    def _on_rendered(self, name: RequestId, rendered: EngineOutput) -> None:
        """Note that an answer of a call was sent to the engine core, with its prompt's length."""
        request, index = self._runs.get(name), rendered.child
        if request is None or request.call is None or index is None:
            return
        known = request.call.children[index : index + 1]
        num_tokens = rendered.prompt_tokens + sum(each.num_tokens for each in known)
        self._arrived(request, answer_run(name, index), num_tokens)

    def _answered(self, request: EngineRequest) -> None:
        monitor = self._telemetry.monitor(request.model)
        if monitor is not None:
            monitor.answered(request.request_id)

    def _cancel(self, request_id: RequestId) -> None:
        if self._link is not None:
            self._link.send(Abort(request_id))

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event, EngineDied):
            self._on_engine_died(event)
        elif events := events_of(event):
            self._report(events)
            for each in events:
                if isinstance(each, NewOutput) and each.output.prompt_tokens:
                    self._on_rendered(each.request_id, each.output)

    def _on_engine_died(self, event: EngineDied) -> None:
        model = ModelName(event.model)
        log.error("engine.died", model=model, reason=event.message)
        was_active = model == self._residency.active
        self._models.lose_engine(model)
        if was_active:
            self._alive = False
            self._lose(event.message)

    def _on_lost(self, message: str) -> None:
        log.error("engine.died", reason=message)
        self._link = None
        self._end(message)

    def _end(self, message: str) -> None:
        self._alive = False
        self._models.lose_engines()
        self._lose(message)


def identity_of(
    settings: VllmSettings, host: HostReady | None, entries: Collection[ModelEntry]
) -> EngineIdentity:
    """
    Identity of an engine for the models *entries* on *host*; None: an engine on a CPU, of unknown
    version.

    Engines on several devices have neither checkpoints nor safepoints.
    """
    is_cpu = host is None or host.is_cpu
    is_single = not entries or any(num_devices(entry) == 1 for entry in entries)
    capabilities = capabilities_with(
        {
            Capability.CALLS: True,
            Capability.CHECKPOINT: is_single and has_checkpoints(settings, is_cpu=is_cpu),
            Capability.LAYER_PREEMPTION: is_single and safepoint_layers(settings, is_cpu=is_cpu),
        }
    )
    if host is None:
        return EngineIdentity(engine="vllm", device="unknown", capabilities=capabilities)
    version = host.version.partition("+")[0]  # without the build suffix
    device = device_name(host.device, entries)
    return EngineIdentity(engine=f"vllm-{version}", device=device, capabilities=capabilities)
