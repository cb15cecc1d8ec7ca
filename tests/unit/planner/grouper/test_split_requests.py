"""Requests for a split: their target by the id, and the fallback if they would be late."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.planner.settings import GrouperSettings
from shared.contracts.base import ModelName
from shared.contracts.models import TrafficSplit
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.requests import QueuedRequest
from shared.models.registry import ModelRegistry
from shared.models.splits import target_of
from shared.models.tiny import make_tiny_models
from tests.clocks import NOW
from tests.queued import MODEL, OTHER
from tests.unit.planner.rig import GrouperRig, open_grouper

pytestmark = pytest.mark.virtual_time
SPLIT = TrafficSplit(name=ModelName("chat"), weights={MODEL: 1.0, OTHER: 1.0}, fallback="tiny-qwen")
TEXT: dict[str, Any] = {
    "model": "chat", "prompt": "hello", "max_tokens": 8, "slo": {"ttft_s": 2.0, "tbt_s": 1.0}
}  # fmt: skip


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    registry = ModelRegistry.load(make_tiny_models(tmp_path, weights=False))
    registry.set_splits([SPLIT])
    return registry


async def taken(rig: GrouperRig, body: dict[str, Any], **fields: Any) -> QueuedRequest:
    """The queued request of *body*, from whatever lane."""
    await rig.submit(body, **fields)
    (lane,) = rig.grouper.state.lanes
    rig.grouper.state.lanes.clear()
    return await rig.queued(lane)


def forecast(rig: GrouperRig, request: QueuedRequest, wait_s: float) -> None:
    """The leader predicts *wait_s* for the lane of *request*."""
    lane = LaneForecast(lane=request.lane, wait_s=wait_s, wait_sd_s=0.1, request_s=0.1)
    rig.grouper.on_forecast(LanesForecast(epoch=1, at=NOW, lanes=(lane,)))


@pytest.mark.parametrize("request_id", [f"r{number}" for number in range(4)])
async def test_the_id_determines_the_model(registry: ModelRegistry, request_id: str):
    async with open_grouper(registry) as rig:
        request = await taken(rig, TEXT | {"id": request_id})

        assert request.model.name == target_of(SPLIT, request_id)
        assert request.lane.split(".")[2] == request.model.base


async def test_a_call_names_its_target(registry: ModelRegistry):
    body = {"model": "chat", "prompt": "hello", "max_tokens": 8}
    call = {"endpoint": "/v1/completions", "body": body, "id": "r0"}
    async with open_grouper(registry) as rig:
        request = await taken(rig, call)

        assert request.call is not None
        assert msgspec.json.decode(request.call.body)["model"] == target_of(SPLIT, "r0")


@pytest.mark.parametrize(("wait_s", "falls_back"), [(60.0, True), (0.5, False), (math.nan, False)])
async def test_a_request_that_would_be_late_goes_to_the_fallback(
    registry: ModelRegistry, *, wait_s: float, falls_back: bool
):
    async with open_grouper(registry) as rig:
        first = await taken(rig, TEXT | {"id": "r0"})
        if not math.isnan(wait_s):  # else the wait is not known
            forecast(rig, first, wait_s)
        rig.grouper.state.recent.clear()
        again = await taken(rig, TEXT | {"id": "r0"})

        assert again.model.name == ("tiny-qwen" if falls_back else first.model.name)


@pytest.mark.parametrize(
    "changes", [{"slo": {}}, {"prompt": [10, 11]}], ids=["best effort", "tokens of the target"]
)
async def test_other_requests_wait_for_their_target(
    registry: ModelRegistry, changes: dict[str, Any]
):
    async with open_grouper(registry, GrouperSettings()) as rig:
        first = await taken(rig, TEXT | {"id": "r0"} | changes)
        forecast(rig, first, 60.0)
        rig.grouper.state.recent.clear()

        assert (await taken(rig, TEXT | {"id": "r0"} | changes)).model == first.model
