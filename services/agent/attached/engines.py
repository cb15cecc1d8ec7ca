"""Engines of the instances in servers that others run."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from services.agent.backends.base import EngineBackend
from services.agent.backends.registry import MakeEngine
from services.agent.backends.remote.backend import RemoteEngine
from services.agent.backends.remote.token_host import TokenHost
from services.agent.backends.settings import EngineSettings
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.agent.settings import Settings
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.runtime.clock import Clock
from solver.scheduling.concurrency import FleetLimits


@asynccontextmanager
async def attached_engines(settings: Settings) -> AsyncIterator[MakeEngine]:
    """
    Context with a function that creates the engine of an instance; all engines share an engine
    host, if they need one.

    Raises:
        SettingsError: The registry cannot be read, or does not have the model.
    """
    host = TokenHost(settings.engine.vllm) if _needs_host(settings) else None
    fleet = FleetLimits()

    def make_engine(
        _name: str, entries: Iterable[ModelEntry], engine: EngineSettings, _clock: Clock
    ) -> EngineBackend:
        return RemoteEngine(entries, engine.remote, host, fleet)

    try:
        yield make_engine
    finally:
        if host is not None:
            await host.close()


def _needs_host(settings: Settings) -> bool:
    entry = ModelRegistry.load(Path(settings.registry)).entry(ModelName(settings.models[0]))
    if entry.takes_bodies:
        return False
    wanted = settings.engine.remote.reads_bodies
    has_vllm = settings.engine.vllm.python is not None or vllm_unavailable_reason() is None
    return has_vllm if wanted is None else wanted
