"""Tiny models made once, and an agent on a broker of its own for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.base import ModelName
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.models.tokenizer import Tokenizer
from tests.unit.agent.rig import AgentRig, open_agent


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
