"""A registry created once, and a grouper on a separate broker for each test."""

from collections.abc import AsyncIterator

import pytest

from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.unit.planner.leader_rig import LeaderRig, open_cluster
from tests.unit.planner.rig import GrouperRig, open_grouper


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path_factory.mktemp("models"), weights=False))


@pytest.fixture
async def rig(registry: ModelRegistry) -> AsyncIterator[GrouperRig]:
    async with open_grouper(registry) as opened:
        yield opened


@pytest.fixture
async def cluster() -> AsyncIterator[LeaderRig]:
    async with open_cluster() as rig:
        yield rig
