"""Backends by name. A backend's code is imported only when it is selected."""

from collections.abc import Callable, Iterable

from services.agent.backends.base import EngineBackend
from services.agent.backends.settings import EngineSettings
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.runtime import extensions
from shared.runtime.clock import Clock

Entries = tuple[ModelEntry, ...]


def _simulated(entries: Entries, settings: EngineSettings, clock: Clock) -> EngineBackend:
    from services.agent.backends.simulated.backend import (  # noqa: PLC0415 - imported when chosen
        SimulatedEngine,
    )

    return SimulatedEngine(entries, settings.simulated, clock)


def _vllm(entries: Entries, settings: EngineSettings, clock: Clock) -> EngineBackend:  # noqa: ARG001 - same signature for all
    from services.agent.backends.vllm.front.backend import VllmEngine  # noqa: PLC0415 - as above

    return VllmEngine(entries, settings.vllm)


def _remote(entries: Entries, settings: EngineSettings, clock: Clock) -> EngineBackend:  # noqa: ARG001 - same signature for all
    from services.agent.backends.remote.backend import RemoteEngine  # noqa: PLC0415 - as above

    return RemoteEngine(entries, settings.remote)


REMOTE = "remote"
"""Backend of servers that others run, which needs no engine of ours."""
BACKENDS: dict[str, Callable[[Entries, EngineSettings, Clock], EngineBackend]] = {
    "simulated": _simulated,
    "vllm": _vllm,
    REMOTE: _remote,
}


def backend_names() -> list[str]:
    """Names of all backends, also of those that installed packages add."""
    return sorted({*BACKENDS, *extensions.names(extensions.ENGINES)})


MakeEngine = Callable[[str, Iterable[ModelEntry], EngineSettings, Clock], EngineBackend]
"""A function like `create_backend`."""


def create_backend(
    name: str, entries: Iterable[ModelEntry], settings: EngineSettings, clock: Clock
) -> EngineBackend:
    """
    Create the backend called *name*, without starting it.

    Args:
        name: One of `backend_names()`.
        entries: Models that the backend can activate.
        settings: Settings of all backends; each backend uses its own section.
        clock: Clock of request arrivals and deadlines.

    Raises:
        SettingsError: No backend has this name, or what a package has is not a backend.
    """
    factory = BACKENDS.get(name)
    if factory is not None:
        return factory(tuple(entries), settings, clock)
    check_backend(name)
    arguments = (tuple(entries), settings.options, clock)
    added: EngineBackend = extensions.make(extensions.ENGINES, name, EngineBackend, *arguments)
    return added


def check_backend(name: str) -> None:
    """
    Check that there is a backend called *name*.

    Raises:
        SettingsError: There is none; the message lists all.
    """
    if name not in (known := backend_names()):
        raise SettingsError(
            f"engine.backend {name!r} does not exist; must be one of: {', '.join(known)}. A "
            f"package adds one by an entry point in the group {extensions.ENGINES}"
        )
