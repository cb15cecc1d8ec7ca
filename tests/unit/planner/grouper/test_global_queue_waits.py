"""The wait of a request counts from its arrival, even in a global queue without a grouper."""

import pytest

from services.agent.answer import AnswerStream
from services.agent.backends.base import EngineOutput
from shared.broker import topology
from shared.contracts.base import RunId
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import QueuedRequest, ReplyMode
from shared.producer.producer import Producer
from tests.clocks import NOW
from tests.queued import MODEL
from tests.unit.planner.rig import GrouperRig

AWAY_S = 6.0


async def grouped_late(
    rig: GrouperRig, body: InferenceRequest, user_id: str | None
) -> QueuedRequest:
    """The request of *body* after a grouper that started late has queued it."""
    async with Producer(rig.far, name="t", clock=rig.clock, user_id=user_id) as producer:
        generation = await producer.submit(body, reply=ReplyMode.FINAL)
        rig.clock.advance(AWAY_S)
        await rig.grouper.on_request(await rig.pull(topology.GLOBAL_INTERACTIVE))
        await generation.cancel()
    (lane,) = rig.grouper.state.lanes
    return await rig.queued(lane)


def attained(request: QueuedRequest, *, first_token_at: float) -> bool:
    answer = AnswerStream(request)
    answer.push(EngineOutput(token_ids=(20,)), RunId("run"), first_token_at)
    return answer.verdict(finished_at=first_token_at).attained


@pytest.mark.parametrize(("ttft_s", "in_time"), [(5.0, False), (7.0, True)])
async def test_wait_for_a_grouper_counts(rig: GrouperRig, ttft_s: float, in_time: object):
    body = InferenceRequest(model=MODEL, prompt=(10, 11), max_tokens=8, slo=Slo(ttft_s=ttft_s))

    request = await grouped_late(rig, body, user_id="guest")

    assert (request.arrived_at, request.grouped_at) == (NOW, NOW + AWAY_S)
    assert attained(request, first_token_at=NOW + AWAY_S + 0.1) is in_time


async def test_wait_of_untrusted_publishers_does_not_count(rig: GrouperRig):
    body = InferenceRequest(model=MODEL, prompt=(10, 11), max_tokens=8, slo=Slo(ttft_s=5.0))

    request = await grouped_late(rig, body, user_id=None)

    assert request.arrived_at == NOW + AWAY_S
    assert attained(request, first_token_at=NOW + AWAY_S + 0.1) is True
