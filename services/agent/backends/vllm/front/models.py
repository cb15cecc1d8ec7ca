"""Models of vLLM engines in the front: activation, warming, cooling."""

import time
from collections.abc import Iterable

import msgspec
import structlog

from services.agent.backends.residency import Activation, Footprint, ResidencyTable
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.arguments import (
    engine_arguments,
    has_checkpoints,
    host_kv_bytes,
)
from services.agent.backends.vllm.front.device_defaults import CPU_KV_CACHE_BYTES
from services.agent.backends.vllm.front.link import HostLink
from services.agent.backends.vllm.front.parallel import num_devices, num_ranks
from services.agent.backends.vllm.front.telemetry import EngineTelemetry
from services.agent.backends.vllm.shared.wire import (
    Activate,
    Drop,
    EngineChoices,
    Reply,
    Warm,
)
from services.agent.backends.weights import HostWeights, engine_shape
from services.agent.devices.warm_memory import warm_bytes_of
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, NoRoomError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import ActivationPath, Residency
from shared.models.files.sizes import weight_bytes

log = structlog.get_logger()

_PRIOR_S = {
    ActivationPath.PARKED: 0.05,
    ActivationPath.RELOAD: 1.0,
    ActivationPath.START: 8.0,
    ActivationPath.COLD: 10.0,
}
_ENGINE_OVERHEAD_BYTES = 384 << 20
"""
Host memory of each process of a parked engine besides weights and KV, until it is measured.
"""


class EngineModels:
    """
    The models of one host.

    Args:
        entries: Models that can be activated.
        settings: Settings of the backend.
        telemetry: Telemetry of the engines; updated here.
    """

    def __init__(
        self, entries: Iterable[ModelEntry], settings: VllmSettings, telemetry: EngineTelemetry
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._settings = settings
        self._telemetry = telemetry
        self._weights = HostWeights()
        self._is_cpu = True
        self._with_room: set[ModelName] = set()
        """Models whose engine was started with room for adapters."""
        self.loading: set[ModelName] = set()
        """Models that are being activated or warmed; only this class writes the field."""
        self.choices: dict[ModelName, EngineChoices] = {}
        """Model -> configuration of its last engine; only this class writes the field."""
        self.residency = ResidencyTable(
            {name: self._footprint(entry) for name, entry in self._entries.items()},
            warm_bytes=warm_bytes_of(settings),
            prior_s=_PRIOR_S,
        )

    def add(self, entry: ModelEntry) -> None:
        """Add a model, which is cold."""
        self._entries[entry.name] = entry
        self.residency.add(entry.name, self._footprint(entry))

    def on_host(self, *, is_cpu: bool) -> None:
        """Record that the host has started, and whether its engines run on a CPU."""
        if is_cpu == self._is_cpu:
            return
        self._is_cpu = is_cpu
        for name, entry in self._entries.items():
            self.residency.measured(name, self._footprint(entry).engine_bytes)

    async def activate(self, model: ModelName, link: HostLink) -> Seconds:
        """
        Activate *model* by the cheapest path.

        Returns:
            Duration in seconds; 0 if the model was already active.

        Raises:
            EngineError: The model cannot be loaded in time, or the host has ended (`engine_dead`).
        """
        activation = self.residency.activation(model)
        if activation is None:
            return 0.0
        begun = time.monotonic()
        arguments = self._prepare(activation)
        command = Activate(
            model, arguments, activation.drop, activation.donor or "", sleep=not self._is_cpu
        )
        self.residency.is_activating = True
        try:
            reply = await self._loaded(link, command)
        except EngineError:
            self.forget([name for name in (model, activation.donor) if name is not None])
            raise
        finally:
            self.residency.is_activating = False
        duration_s = time.monotonic() - begun
        self.residency.activated(activation, duration_s)
        if activation.path in (ActivationPath.START, ActivationPath.COLD):
            self._created(model, reply)
        self._telemetry.limit(model)
        return duration_s

    async def warm(self, model: ModelName, link: HostLink) -> Seconds:
        """
        Load *model* into host memory while the active model continues to serve.

        The model gets its own parked engine. If another engine could load its weights, or an engine
        would not fit, only its weights are held in host memory.

        Returns:
            Duration in seconds; 0 if the model is active or warm.

        Raises:
            NoRoomError: The model does not fit.
            EngineError: The model cannot be loaded.
        """
        residency = self.residency
        if residency.residency(model) is not Residency.COLD:
            return 0.0
        begun = time.monotonic()
        wants_engine = residency.donor(model) is None and residency.room_for_engine(model)
        if wants_engine and await self._has_warm_engine(model, link):
            residency.parked(model)
        elif residency.room_for_weights(model):
            await self._weights.hold(self._entries[model])
            residency.held(model)
        else:
            raise NoRoomError(
                f"no room to warm {model}: {residency.used_bytes} of {residency.warm_bytes} bytes "
                "of host memory are taken; cool another model, or raise engine.vllm.warm_bytes"
            )
        return time.monotonic() - begun

    async def _has_warm_engine(self, model: ModelName, link: HostLink) -> bool:
        """Create a parked engine, drop it if it is too large, and return whether it is kept."""
        self._open(model)
        fits = False
        try:
            command = Warm(model, self._arguments(model), sleep=not self._is_cpu)
            self._created(model, await self._loaded(link, command))
            fits = self.residency.room_for_engine(model)
        finally:
            # Drop the engine after a cancellation also, since it would remain in the host
            # unrecorded.
            if not fits:
                self._telemetry.forget((model,))
                link.send(Drop((model,)))
        if not fits:
            log.warning(
                "engine.too_large",
                model=model,
                used_bytes=self.residency.used_bytes,
                warm_bytes=self.residency.warm_bytes,
            )
        return fits

    def cool(self, model: ModelName, link: HostLink) -> None:
        """
        Unload *model* from host memory, if it is warm.

        Raises:
            EngineError: The model is active or being loaded.
        """
        if model == self.residency.active or model in self.loading:
            raise EngineError(f"{model} is active or being loaded; activate another model first")
        link.send(Drop((model,)))
        self.forget((model,))

    def lacks_room(self, entry: ModelEntry) -> bool:
        """Return whether the model has an engine without room for the adapters of *entry*."""
        has_engine = self._telemetry.monitor(entry.name) is not None
        return has_engine and bool(entry.adapters) and entry.name not in self._with_room

    def replace(self, entry: ModelEntry) -> None:
        """Replace the entry of a known model."""
        self._entries[entry.name] = entry
        self.residency.replace(entry.name, self._footprint(entry))

    def remove(self, model: ModelName, link: HostLink) -> None:
        """Shut the engine of *model* down, if it has one, and forget the model."""
        link.send(Drop((model,)))
        self.forget((model,))
        self.residency.remove(model)
        del self._entries[model]

    def forget(self, models: Iterable[ModelName]) -> None:
        """Record that *models* are cold."""
        models = tuple(models)
        self.residency.drop(models)
        self._telemetry.forget(models)
        for model in models:
            self._weights.release(model)

    def lose_engine(self, model: ModelName) -> None:
        """Record that *model* has no engine now; held weights remain."""
        self.residency.lose(model)
        self._telemetry.forget((model,))

    def lose_engines(self) -> None:
        """Record that the host has ended with all its engines."""
        self.residency.clear()
        self._telemetry.forget(self._entries)

    def close(self) -> None:
        """Release held weights."""
        self._weights.close()

    async def _loaded(self, link: HostLink, command: Activate | Warm) -> Reply:
        """Send *command* and wait for its execution."""
        model = ModelName(command.model)
        self.loading.add(model)
        try:
            return await link.ask(command, self._settings.activate_timeout_s)
        except TimeoutError:
            link.kill()
            raise EngineError(
                f"{model} was not loaded within {self._settings.activate_timeout_s} s",
                engine_dead=True,
            ) from None
        finally:
            self.loading.discard(model)

    def _prepare(self, activation: Activation) -> dict[str, object]:
        """Update telemetry for *activation*, and return the arguments of the model's engine."""
        if activation.donor is not None:
            self._telemetry.pass_on(activation.donor, activation.model)
            self._with_room.discard(activation.model)
        elif activation.path is not ActivationPath.PARKED:
            self._open(activation.model)
        self.forget(activation.drop)
        return self._arguments(activation.model)

    def _open(self, model: ModelName) -> None:
        """Prepare for a new engine of *model*."""
        self._telemetry.open(model, num_ranks(self._entries[model]))
        if self._entries[model].adapter_slots > 0:
            self._with_room.add(model)
        else:
            self._with_room.discard(model)

    def _arguments(self, model: ModelName) -> dict[str, object]:
        return engine_arguments(
            self._entries[model],
            self._settings,
            is_cpu=self._is_cpu,
            stats_path=self._telemetry.path(model),
        )

    def _created(self, model: ModelName, reply: Reply) -> None:
        """Record the configuration of *model*'s new engine, and its host memory as measured."""
        if reply.choices is not None:
            self.choices[model] = reply.choices
            log.info("engine.configured", model=model, **msgspec.structs.asdict(reply.choices))
        if reply.host_bytes:
            later_bytes = self._later_bytes(self._entries[model])
            self.residency.measured(model, reply.host_bytes + later_bytes)

    def _later_bytes(self, entry: ModelEntry) -> int:
        """Host memory that an engine allocates after its creation, in bytes."""
        if not self._is_cpu:
            return weight_bytes(entry)  # this memory is allocated when the engine sleeps
        copies = has_checkpoints(self._settings, is_cpu=True)
        return host_kv_bytes(self._settings) if copies else 0

    def _footprint(self, entry: ModelEntry) -> Footprint:
        weights, later = weight_bytes(entry), self._later_bytes(entry)
        workers = num_devices(entry)
        # The only worker of an engine core runs in the core; several are processes.
        processes = 1 if workers == 1 else workers + num_ranks(entry)
        made = processes * _ENGINE_OVERHEAD_BYTES
        if self._is_cpu:
            kv_cache_bytes = self._settings.kv_cache_bytes or CPU_KV_CACHE_BYTES
            made += num_ranks(entry) * weights + workers * kv_cache_bytes
        return Footprint(weight_bytes=weights, engine_bytes=made + later, shape=engine_shape(entry))
