"""Which models vLLM engines hold, seen from the front: activation, warming, cooling."""

import asyncio
import time
from collections.abc import Iterable

import structlog

from services.agent.backends.residency import Activation, Footprint, ResidencyTable
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.arguments import (
    CPU_KV_CACHE_BYTES,
    engine_arguments,
    has_checkpoints,
    host_kv_bytes,
)
from services.agent.backends.vllm.link import HostLink
from services.agent.backends.vllm.telemetry import EngineTelemetry
from services.agent.backends.vllm.wire import Activate, Activated, ActivationFailed, Drop, Warm
from services.agent.backends.weights import HostWeights, engine_shape, weight_bytes
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, NoRoomError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import ActivationPath, Residency

log = structlog.get_logger()

_PRIOR_S = {
    ActivationPath.PARKED: 0.05,
    ActivationPath.RELOAD: 1.0,
    ActivationPath.START: 8.0,
    ActivationPath.COLD: 10.0,
}
_ENGINE_OVERHEAD_BYTES = 384 << 20
"""Of a parked engine, beside weights and KV, until it was measured."""


class EngineModels:
    """
    The models of one host.

    Args:
        entries: All that can be activated.
        settings: Of the backend.
        telemetry: Of the engines; kept in step here.
    """

    def __init__(
        self, entries: Iterable[ModelEntry], settings: VllmSettings, telemetry: EngineTelemetry
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._settings = settings
        self._telemetry = telemetry
        self._weights = HostWeights()
        self._loading: dict[ModelName, asyncio.Future[int]] = {}
        self._is_cpu = True
        self.is_activating = False
        """Whether the active model is about to change."""
        self.residency = ResidencyTable(
            {name: self._footprint(entry) for name, entry in self._entries.items()},
            warm_bytes=settings.warm_bytes,
            prior_s=_PRIOR_S,
        )

    def on_host(self, *, is_cpu: bool) -> None:
        """The host is up; what its engines compute on."""
        if is_cpu == self._is_cpu:
            return
        self._is_cpu = is_cpu
        for name, entry in self._entries.items():
            self.residency.measured(name, self._footprint(entry).engine_bytes)

    @property
    def is_loading(self) -> bool:
        """Whether a model is being activated or warmed."""
        return bool(self._loading)

    async def activate(self, model: ModelName, link: HostLink) -> Seconds:
        """
        Make *model* the active one, however that is cheapest.

        Returns:
            Seconds it took; 0 when it was active already.

        Raises:
            EngineError: It cannot be loaded, or not in time; with `engine_dead`, the host is gone.
        """
        activation = self.residency.activation(model)
        if activation is None:
            return 0.0
        begun = time.monotonic()
        arguments = self._prepare(activation)
        command = Activate(
            model, arguments, activation.drop, activation.donor or "", sleep=not self._is_cpu
        )
        self.is_activating = True
        try:
            host_bytes = await self._loaded(link, command)
        except EngineError:
            self.forget([name for name in (model, activation.donor) if name is not None])
            raise
        finally:
            self.is_activating = False
        duration_s = time.monotonic() - begun
        self.residency.activated(activation, duration_s)
        if activation.path in (ActivationPath.START, ActivationPath.COLD):
            self._measured(model, host_bytes)
        self._telemetry.limit(model)
        return duration_s

    async def warm(self, model: ModelName, link: HostLink) -> Seconds:
        """
        Bring *model* into host memory while the active one serves on.

        With an engine of its own, or only with its weights where another engine could take them
        in, or where an engine would not fit.

        Returns:
            Seconds it took; 0 when it is active or warm.

        Raises:
            NoRoomError: It does not fit.
            EngineError: It cannot be loaded.
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
        """Make a parked engine; it goes again if it turns out to be larger than the room for it."""
        self._telemetry.open(model)
        fits = False
        try:
            command = Warm(model, self._arguments(model), sleep=not self._is_cpu)
            self._measured(model, await self._loaded(link, command))
            fits = self.residency.room_for_engine(model)
        finally:
            # Given up, too: nobody here would know of that engine.
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
        Take *model* out of host memory, if it is warm.

        Raises:
            EngineError: It is the active one, or being loaded.
        """
        if model == self.residency.active or model in self._loading:
            raise EngineError(f"{model} is active or being loaded; activate another model first")
        link.send(Drop((model,)))
        self.forget((model,))

    def forget(self, models: Iterable[ModelName]) -> None:
        """*models* are cold now."""
        models = tuple(models)
        self.residency.drop(models)
        self._telemetry.forget(models)
        for model in models:
            self._weights.release(model)

    def lose_engine(self, model: ModelName) -> None:
        """The engine of *model* is gone; weights that are held stay."""
        self.residency.lose(model)
        self._telemetry.forget((model,))

    def lose_engines(self, message: str) -> None:
        """The host is gone, with all engines."""
        self.residency.clear()
        self._telemetry.forget(self._entries)
        for future in self._loading.values():
            if not future.done():
                future.set_exception(EngineError(message, engine_dead=True))

    def close(self) -> None:
        """Release held weights."""
        self._weights.close()

    def on_event(self, event: Activated | ActivationFailed) -> None:
        """The host has loaded a model, or failed to."""
        future = self._loading.get(ModelName(event.model))
        if future is None or future.done():
            return
        if isinstance(event, Activated):
            future.set_result(event.host_bytes)
        else:
            future.set_exception(EngineError(f"cannot load {event.model}: {event.message}"))

    async def _loaded(self, link: HostLink, command: Activate | Warm) -> int:
        """Host memory of the engine, once the host has carried *command* out."""
        model = ModelName(command.model)
        self._loading[model] = asyncio.get_running_loop().create_future()
        link.send(command)
        try:
            async with asyncio.timeout(self._settings.activate_timeout_s):
                return await self._loading[model]
        except TimeoutError:
            link.kill()
            raise EngineError(
                f"{model} was not loaded within {self._settings.activate_timeout_s} s",
                engine_dead=True,
            ) from None
        finally:
            del self._loading[model]

    def _prepare(self, activation: Activation) -> dict[str, object]:
        """Bring telemetry in step with what is about to happen; the engine's arguments."""
        if activation.donor is not None:
            self._telemetry.pass_on(activation.donor, activation.model)
        elif activation.path is not ActivationPath.PARKED:
            self._telemetry.open(activation.model)
        self.forget(activation.drop)
        return self._arguments(activation.model)

    def _arguments(self, model: ModelName) -> dict[str, object]:
        return engine_arguments(
            self._entries[model],
            self._settings,
            is_cpu=self._is_cpu,
            stats_path=self._telemetry.path(model),
        )

    def _measured(self, model: ModelName, host_bytes: int) -> None:
        """Note what *model*'s engine took of host memory when it was made."""
        if host_bytes:
            self.residency.measured(model, host_bytes + self._later_bytes(self._entries[model]))

    def _later_bytes(self, entry: ModelEntry) -> int:
        """Host memory that an engine takes after it was made."""
        if not self._is_cpu:
            return weight_bytes(entry)  # when it sleeps
        copies = has_checkpoints(self._settings, is_cpu=True)
        return host_kv_bytes(self._settings) if copies else 0

    def _footprint(self, entry: ModelEntry) -> Footprint:
        weights, later = weight_bytes(entry), self._later_bytes(entry)
        made = _ENGINE_OVERHEAD_BYTES
        if self._is_cpu:
            made += weights + (self._settings.kv_cache_bytes or CPU_KV_CACHE_BYTES)
        return Footprint(weight_bytes=weights, engine_bytes=made + later, shape=engine_shape(entry))
