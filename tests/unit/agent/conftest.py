"""Tiny models created once, and an agent on a separate broker for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.agent.lso.situation import ModelSizes
from shared.contracts.base import ModelName
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.models.tokenizer import Tokenizer
from tests.queued import MODEL, OTHER
from tests.unit.agent.rig import AgentRig, open_agent
from tests.unit.agent.scripted_engine import AbleEngine


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path_factory.mktemp("models"), weights=False))


@pytest.fixture(scope="session")
def tokenizers(registry: ModelRegistry) -> dict[ModelName, Tokenizer]:
    return {name: Tokenizer.load(Path(registry.entry(name).path)) for name in registry.bases}


@pytest.fixture
async def rig(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
) -> AsyncIterator[AgentRig]:
    async with open_agent(registry, tokenizers) as opened:
        yield opened


@pytest.fixture
def engine() -> AbleEngine:
    return AbleEngine()


@pytest.fixture
def sizes() -> ModelSizes:
    """Small, known model sizes, with 16 bytes of KV per token."""
    return ModelSizes(weights={MODEL: 1000, OTHER: 2000}, kv_per_token={MODEL: 16, OTHER: 16})


@pytest.fixture
async def able(
    registry: ModelRegistry,
    tokenizers: dict[ModelName, Tokenizer],
    engine: AbleEngine,
    sizes: ModelSizes,
) -> AsyncIterator[AgentRig]:
    """An agent whose engine has all capabilities."""
    async with open_agent(registry, tokenizers, engine=engine, sizes=sizes) as opened:
        yield opened
