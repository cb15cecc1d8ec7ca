"""Which models the simulated engine holds, and the time that moving them takes."""

import asyncio
from collections.abc import Iterable

from services.agent.backends.residency import Activation, Footprint, ResidencyTable
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, NoRoomError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import ActivationPath, Residency

_ENGINE_OVERHEAD_BYTES = 512 << 20
"""Of a parked engine, beside the weights; as a real one's on a CPU."""


class SimulatedModels:
    """
    Models that are active, parked, or cold.

    Args:
        entries: All that can be activated.
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

    async def load(self, activation: Activation) -> Seconds:
        """Take the simulated time of *activation*; `activated` comes after."""
        self.residency.drop(activation.drop)
        duration_s = self._activation_s[activation.path]
        await asyncio.sleep(duration_s * self._time_scale)
        return duration_s

    async def warm(self, model: ModelName) -> Seconds:
        """
        Load *model* into an engine of its own, which is parked.

        Returns:
            Simulated seconds it took; 0 when it is active or warm.

        Raises:
            NoRoomError: It does not fit.
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
        Take *model* out of host memory.

        Raises:
            EngineError: It is active.
        """
        if model == self.residency.active:
            raise EngineError(f"{model} is active; activate another model first")
        self.residency.drop((model,))


def _footprint(entry: ModelEntry) -> Footprint:
    return Footprint(
        weight_bytes=entry.weight_bytes,
        engine_bytes=entry.weight_bytes + _ENGINE_OVERHEAD_BYTES,
    )
