"""Backends by name. A backend's code is imported when it is chosen."""

from collections.abc import Callable, Iterable

from services.agent.backends.base import EngineBackend
from services.agent.backends.settings import EngineSettings
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.runtime.clock import Clock

Entries = tuple[ModelEntry, ...]


def _simulated(entries: Entries, settings: EngineSettings, clock: Clock) -> EngineBackend:
    from services.agent.backends.simulated.backend import (  # noqa: PLC0415 - imported when chosen
        SimulatedEngine,
    )

    return SimulatedEngine(entries, settings.simulated, clock)


def _vllm(entries: Entries, settings: EngineSettings, clock: Clock) -> EngineBackend:  # noqa: ARG001 - same signature for all
    from services.agent.backends.vllm.backend import VllmEngine  # noqa: PLC0415 - as above

    return VllmEngine(entries, settings.vllm)


BACKENDS: dict[str, Callable[[Entries, EngineSettings, Clock], EngineBackend]] = {
    "simulated": _simulated,
    "vllm": _vllm,
}


def create_backend(
    name: str, entries: Iterable[ModelEntry], settings: EngineSettings, clock: Clock
) -> EngineBackend:
    """
    The backend called *name*, not started.

    Args:
        name: One of `BACKENDS`.
        entries: Models that it may be asked to activate.
        settings: Of all backends; each takes its part.
        clock: What request arrivals and deadlines are compared with.

    Raises:
        SettingsError: No such backend.
    """
    factory = BACKENDS.get(name)
    if factory is None:
        raise SettingsError(f"engine backend {name!r} is none of: {', '.join(sorted(BACKENDS))}")
    return factory(tuple(entries), settings, clock)
