"""A grouper reports a record of each request that it ends."""

from typing import Any

import msgspec
import pytest

from services.planner.grouper.watched_ends import GRACE_S
from services.planner.settings import GrouperSettings
from shared.broker import topology
from shared.broker.protocol import Settlement
from shared.broker.stories import StoryOutbox
from shared.contracts.base import Decoder
from shared.contracts.errors import CapacityError
from shared.contracts.stories.story import StoriesObserved, Story
from shared.models.registry import ModelRegistry
from tests.clocks import NOW
from tests.queued import a_request
from tests.unit.planner.rig import BODY, LANE, GrouperRig, listen, open_grouper, queued_bytes

decode_stories: Decoder[StoriesObserved] = Decoder(StoriesObserved)


async def stories_of(rig: GrouperRig, *bodies: dict[str, Any], pass_s: float = 0.0) -> list[Story]:
    """Records of the grouper after *bodies* were submitted and *pass_s* have passed."""
    rig.grouper.expiry.stories = outbox = StoryOutbox(rig.broker, "grouper")
    queue = await listen(rig.far, topology.TELEMETRY, topology.STORIES_KEY)
    for body in bodies:
        await rig.submit(body, message_id="m1", user_id="guest")
    rig.clock.advance(pass_s)
    await rig.grouper.expiry.end_due()
    await outbox.send()
    if not await rig.far.ready(queue):
        return []
    return list(decode_stories((await rig.far.take(queue)).body).ended)


async def test_a_request_that_ends_in_its_lane_has_a_record(rig: GrouperRig):
    body = BODY | {"ttl_s": 10.0, "tenant": "acme", "slo": {"ttft_s": 2.0}}
    (story,) = await stories_of(rig, body, pass_s=10.0 + GRACE_S)

    assert (story.request_id, story.tenant, story.outcome) == ("m1", "acme", "deadline_expired")
    assert story.is_late
    assert (story.model, story.slo.ttft_s) == (BODY["model"], 2.0)
    assert story.lane == story.queue != ""
    assert (story.arrived_at, story.finished_at) == (NOW, NOW + 10.0 + GRACE_S)
    assert story.instance_id is None


async def test_a_refused_request_has_a_record(rig: GrouperRig):
    (story,) = await stories_of(rig, BODY | {"model": "none", "tenant": "acme"})

    assert (story.request_id, story.tenant, story.outcome) == ("m1", "acme", "model_not_found")
    assert not story.is_late


async def test_requests_above_a_limit_have_no_records(
    rig: GrouperRig, monkeypatch: pytest.MonkeyPatch
):
    """A tenant above its limits must not displace the records of others."""

    def full(*_: object, **__: object) -> None:
        raise CapacityError("full", retry_after_s=1.0)

    monkeypatch.setattr("services.planner.grouper.grouper.check_admission", full)

    assert await stories_of(rig, BODY) == []
    assert (await rig.failure()).error.code == "over_capacity"


async def test_a_request_that_the_broker_dropped_has_its_history(rig: GrouperRig):
    rig.grouper.expiry.stories = StoryOutbox(rig.broker, "grouper")
    queue = await listen(rig.far, topology.TELEMETRY, topology.STORIES_KEY)
    await topology.declare_work_queue(rig.far, LANE)
    request = a_request("r", relegated=True)
    await rig.far.publish(topology.LANES, LANE, queued_bytes(request))
    await (await rig.pull(LANE)).settle(Settlement.REJECT)
    await rig.handle_dead_letter()
    await rig.grouper.expiry.stories.send()
    (story,) = decode_stories((await rig.far.take(queue)).body).ended

    assert (story.request_id, story.outcome) == ("r", "dead_lettered")
    assert story.attempts.relegated


async def test_without_an_outbox_nothing_is_reported(rig: GrouperRig):
    queue = await listen(rig.far, topology.TELEMETRY, topology.STORIES_KEY)
    await rig.submit(BODY | {"model": "none"})

    assert rig.grouper.expiry.stories is None
    assert await rig.far.ready(queue) == 0


async def test_a_held_request_that_is_refused_has_its_own_tenant(registry: ModelRegistry):
    """Its message comes from a planner, not from its producer."""
    async with open_grouper(registry, GrouperSettings()) as rig:
        rig.grouper.expiry.stories = StoryOutbox(rig.broker, "grouper")
        queue = await listen(rig.far, topology.TELEMETRY, topology.STORIES_KEY)
        request = msgspec.structs.replace(a_request("r", base="gone"), arrived_at=NOW - 1.0)
        await rig.far.publish(topology.LANES, topology.HELD, queued_bytes(request))
        await rig.grouper.on_held(await rig.pull(topology.HELD))
        await rig.grouper.expiry.stories.send()
        (story,) = decode_stories((await rig.far.take(queue)).body).ended

    assert (story.tenant, story.outcome) == ("acme", "model_not_found")
