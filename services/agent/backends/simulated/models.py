"""Residency of models in the simulated engine, and the time of loading and activating them."""

import asyncio
from collections.abc import Iterable

from services.agent.backends.residency import Activation, Footprint, ResidencyTable
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, NoRoomError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import ActivationPath, Residency

_ENGINE_OVERHEAD_BYTES = 512 << 20
"""Host memory of a parked engine without its weights, similar to that of vLLM on a CPU."""


class SimulatedModels:
    """
    The active model, parked models and cold models of a simulated engine.

    Args:
        entries: Models that can be activated.
        settings: Times and memory.
    """

    def __init__(self, entries: Iterable[ModelEntry], settings: SimulatedSettings) -> None:
        self._time_scale = settings.time_scale
        self._cold_s = settings.cold_activation_s
        self._activation_s = {
            ActivationPath.PARKED: settings.warm_activation_s,
            ActivationPath.COLD: settings.cold_activation_s,
        }
        self.residency = ResidencyTable(
            {entry.name: _footprint(entry) for entry in entries},
            warm_bytes=settings.warm_bytes,
            prior_s=self._activation_s,
        )

    def add(self, entry: ModelEntry) -> None:
        """Add a model, which is cold."""
        self.residency.add(entry.name, _footprint(entry))

    async def load(self, activation: Activation) -> Seconds:
        """Wait for the simulated time of *activation*; afterwards the caller calls `activated`."""
        self.residency.drop(activation.drop)
        duration_s = self._activation_s[activation.path]
        await asyncio.sleep(duration_s * self._time_scale)
        return duration_s

    async def warm(self, model: ModelName) -> Seconds:
        """
        Load *model* into its own parked engine.

        Returns:
            Duration in simulated seconds; 0 if the model is active or warm.

        Raises:
            NoRoomError: The model does not fit into the host memory for warm models.
        """
        if self.residency.residency(model) is not Residency.COLD:
            return 0.0
        if not self.residency.room_for_engine(model):
            raise NoRoomError(
                f"no room to warm {model}: {self.residency.used_bytes} of "
                f"{self.residency.warm_bytes} bytes of host memory are taken; cool another "
                "model, or raise engine.simulated.warm_bytes"
            )
        await asyncio.sleep(self._cold_s * self._time_scale)
        if self.residency.residency(model) is Residency.COLD:
            self.residency.parked(model)
        return self._cold_s

    def cool(self, model: ModelName) -> None:
        """
        Unload *model* from host memory.

        Raises:
            EngineError: The model is active.
        """
        if model == self.residency.active:
            raise EngineError(f"{model} is active; activate another model first")
        self.residency.drop((model,))


def _footprint(entry: ModelEntry) -> Footprint:
    return Footprint(
        weight_bytes=entry.weight_bytes,
        engine_bytes=entry.weight_bytes + _ENGINE_OVERHEAD_BYTES,
    )
