"""An agent reports the requests that it pulls, and a record of each that it ends."""

from pathlib import Path
from typing import Any

import pytest

from shared.broker import topology
from shared.broker.stories import PERIOD_S
from shared.contracts.base import Decoder
from shared.contracts.control import EvictRequest, RequestCancel
from shared.contracts.lanes import LaneKey
from shared.contracts.qos import Slo
from shared.contracts.requests import FinishReason
from shared.contracts.stories.story import (
    PulledRequest,
    RequeuedRequest,
    StoriesObserved,
    Story,
)
from shared.models.registry import ModelRegistry
from tests.agents.rig import I1, REPLY, AgentRig, R, listen, open_agent
from tests.brokers import eventually
from tests.queued import a_request

pytestmark = pytest.mark.virtual_time

decode_stories: Decoder[StoriesObserved] = Decoder(StoriesObserved)
REQUEST = a_request("r", reply_to=REPLY, slo=Slo(ttft_s=1e6))


class Heard:
    """All that an agent has reported."""

    def __init__(self, rig: AgentRig, queue: str) -> None:
        self._rig, self._queue = rig, queue
        self.pulled: list[PulledRequest] = []
        self.requeued: list[RequeuedRequest] = []
        self.ended: list[Story] = []

    async def wait(self, *, pulled: int = 0, ended: int = 0) -> None:
        """Wait until as many pulls and ends have come."""

        async def have_come() -> bool:
            while await self._rig.has_ready(self._queue):
                observed = decode_stories((await self._rig.far.take(self._queue)).body)
                assert observed.sender == I1
                self.pulled += observed.pulled
                self.requeued += observed.requeued
                self.ended += observed.ended
            return len(self.pulled) >= pulled and len(self.ended) >= ended

        await eventually(have_come)


@pytest.fixture
async def heard(rig: AgentRig) -> Heard:
    return Heard(rig, await listen(rig, topology.TELEMETRY, topology.STORIES_KEY))


async def test_the_record_of_an_answer_has_its_stages_and_no_text(rig: AgentRig, heard: Heard):
    now = rig.clock.now()
    await rig.answered(REQUEST, (20, 21, 22))
    await heard.wait(pulled=1, ended=1)
    (pulled,), (story,) = heard.pulled, heard.ended

    assert (pulled.request_id, pulled.tenant, pulled.at) == ("r", "acme", story.pulled_at)
    assert (story.outcome, story.attained, story.is_late) == ("completed", True, False)
    assert (story.lane, story.queue, story.instance_id) == (REQUEST.lane, REQUEST.lane, I1)
    assert (story.prompt_tokens, story.output_tokens, story.slo) == (4, 3, REQUEST.slo)
    assert now <= story.pulled_at <= story.submitted_at <= story.first_token_at
    assert story.first_token_at <= story.finished_at
    assert story.history == ()


async def test_a_resumed_request_has_the_steps_of_its_earlier_instance(rig: AgentRig, heard: Heard):
    await rig.running(REQUEST)
    first = rig.engine.requests[R]
    rig.engine.emit("r", 20)
    await rig.deliver(EvictRequest(instance_id=I1, request_id=R))
    await eventually(lambda: rig.engine.requests[R] is not first)
    rig.engine.emit("r", 21, finish=FinishReason.LENGTH)
    await heard.wait(pulled=2, ended=1)
    (story,) = heard.ended
    (step,) = story.history

    assert (step.what, step.why) == ("evicted", "an operator ordered the operation")
    assert [each.at for each in heard.pulled] == [step.pulled_at, story.pulled_at]
    assert [each.step for each in heard.requeued] == [step]
    assert story.queue == LaneKey.parse(REQUEST.lane).resume_name
    assert step.begun_at is not None
    assert step.begun_at <= story.first_token_at <= step.at < story.submitted_at


async def test_an_error_has_a_record(rig: AgentRig, heard: Heard):
    await rig.running(REQUEST)
    await rig.deliver(RequestCancel(request_id=R, reply_to=REPLY))
    await heard.wait(ended=1)
    (story,) = heard.ended

    assert (story.outcome, story.attained, story.is_late) == ("cancelled", False, False)


async def test_a_copy_of_a_held_request_is_not_a_pull(rig: AgentRig, heard: Heard):
    """The instance holds the request since the first delivery."""
    await rig.running(REQUEST)
    await rig.put(REQUEST)
    await rig.running(a_request("other"))
    await heard.wait(pulled=2)

    assert [each.request_id for each in heard.pulled] == ["r", "other"]


@pytest.mark.parametrize(("settings", "number"), [({}, 1), ({"stories": False}, 0)])
async def test_without_the_setting_there_are_no_records(
    registry: ModelRegistry, registry_path: Path, settings: dict[str, Any], number: int
):
    async with open_agent(registry, registry_path, **settings) as rig:
        queue = await listen(rig, topology.TELEMETRY, topology.STORIES_KEY)
        await rig.answered(REQUEST, (20,))
        for _ in range(round(2 * PERIOD_S / 0.005)):
            await rig.settled()

        assert await rig.far.ready(queue) == number
