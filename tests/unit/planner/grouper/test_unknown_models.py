"""A request for an unknown model waits, since its producer may know a newer registry."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.planner.settings import GrouperSettings
from shared.contracts.base import ModelName
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.queued import MODEL
from tests.unit.planner.rig import BODY, LANE, GrouperRig, open_grouper

pytestmark = pytest.mark.virtual_time
NEW = ModelName("new")
WAIT_S = GrouperSettings().unknown_model_wait_s


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path, weights=False))


async def handled(rig: GrouperRig, model: str, **fields: str) -> asyncio.Task[None]:
    """The handling of a request for *model*, which has begun."""
    await rig.publish(BODY | {"model": model}, **fields)
    task = asyncio.create_task(rig.grouper.on_request(await rig.pull()))
    await asyncio.sleep(WAIT_S / 2)
    return task


async def test_a_model_that_is_added_in_time_is_served(registry: ModelRegistry):
    async with open_grouper(registry) as rig:
        task = await handled(rig, NEW)
        registry.add(msgspec.structs.replace(registry.entry(ModelName(MODEL)), name=NEW))
        await task

        assert (await rig.queued(LANE.replace(MODEL, NEW))).model.base == NEW


async def test_a_model_that_remains_unknown_is_refused(registry: ModelRegistry):
    async with open_grouper(registry) as rig:
        task = await handled(rig, NEW)
        assert not task.done()
        await task

        assert (await rig.failure()).error.code == "model_not_found"


async def test_a_model_that_cannot_be_loaded_is_not_ready(registry: ModelRegistry):
    registry.expected = frozenset({NEW})
    async with open_grouper(registry) as rig:
        await (await handled(rig, NEW))
        error = (await rig.failure()).error

        assert (error.code, error.status) == ("model_not_ready", 503)


async def test_the_number_of_waiting_requests_is_limited(registry: ModelRegistry):
    settings = GrouperSettings(max_unknown_model_waiting=1)
    async with open_grouper(registry, settings) as rig:
        first = await handled(rig, NEW)
        await rig.submit(BODY | {"model": NEW, "id": "second"})
        assert (await rig.failure()).request_id == "second"
        assert not first.done()
        await first
        again = await handled(rig, NEW)  # the first one does not count any more
        assert not again.done()
        await again


@pytest.mark.parametrize(("user", "is_taken"), [("guest", True), (None, False)])
async def test_only_a_gateways_request_may_name_a_removed_model(
    registry: ModelRegistry, *, user: str | None, is_taken: bool
):
    """The gateway has accepted the request before the model was removed."""
    registry.remove(ModelName(MODEL))
    settings = GrouperSettings(unknown_model_wait_s=0.0)
    async with open_grouper(registry, settings) as rig:
        await rig.submit(BODY, user_id=user)
        if is_taken:
            assert (await rig.queued()).model.base == MODEL
        else:
            assert (await rig.failure()).error.code == "model_not_found"
