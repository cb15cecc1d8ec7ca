"""Tiny models created once, and an agent on a separate broker for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.agents.rig import AgentRig, open_agent
from tests.agents.scripted_engine import AbleEngine, OrderingEngine
from tests.queued import a_request


@pytest.fixture(scope="session")
def registry_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)


@pytest.fixture(scope="session")
def registry(registry_path: Path) -> ModelRegistry:
    return ModelRegistry.load(registry_path)


@pytest.fixture
async def rig(registry: ModelRegistry, registry_path: Path) -> AsyncIterator[AgentRig]:
    async with open_agent(registry, registry_path) as opened:
        yield opened


@pytest.fixture
async def narrow(registry: ModelRegistry, registry_path: Path) -> AsyncIterator[AgentRig]:
    """An agent whose engine runs one request at a time; it runs `blocker`."""
    engine = OrderingEngine(max_running=1)
    async with open_agent(registry, registry_path, engine=engine) as opened:
        await opened.running(a_request("blocker"))
        yield opened


@pytest.fixture
async def able(registry: ModelRegistry, registry_path: Path) -> AsyncIterator[AgentRig]:
    """An agent whose engine has all capabilities."""
    async with open_agent(registry, registry_path, engine=AbleEngine()) as opened:
        yield opened
