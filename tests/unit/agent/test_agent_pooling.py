"""Requests to pooling models on the engine: the answer comes in one piece and has no tokens."""

import asyncio

import msgspec
import pytest

from services.agent.backends.base import EngineOutput
from shared.api.pooling import NO_SAMPLING
from shared.broker import topology
from shared.contracts.qos import Slo
from shared.contracts.requests import (
    ApiCall,
    FinishReason,
    ReplyMode,
    RequestCompleted,
)
from tests.agents.rig import REPLY, AgentRig, R, decode_observed, listen
from tests.queued import a_request, lane_of

pytestmark = pytest.mark.virtual_time

TARGET = Slo(ttlt_s=2.0)
RESPONSE = b'{"data":[]}'


async def run_called(rig: AgentRig) -> None:
    """Run a call with an estimated length of its inputs."""
    body = msgspec.Raw(b'{"input":["one","two"]}')
    request = a_request(
        "r",
        slo=TARGET,
        prompt=None,
        call=ApiCall(endpoint="/v1/embeddings", body=body, pools=True),
        prompt_tokens=50,
        sampling=NO_SAMPLING,
        expected_tokens=0,
        arrived_at=rig.clock.now(),
        reply_to=REPLY,
        reply_mode=ReplyMode.FINAL,
    )
    await rig.running(request)


def finish_inputs(rig: AgentRig) -> None:
    """The output that stands for all inputs of a call."""
    output = EngineOutput(
        token_ids=(), finish_reason=FinishReason.STOP, child=0, prompt_tokens=7, cached_tokens=2
    )
    rig.engine.output("r", output)


@pytest.mark.parametrize(("taken_s", "attained"), [(1.0, True), (3.0, False)])
async def test_final_has_the_response_and_no_tokens(
    able: AgentRig, taken_s: float, *, attained: bool
):
    observed = await listen(able, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    await run_called(able)
    await asyncio.sleep(taken_s)
    finish_inputs(able)
    able.engine.output("r", EngineOutput(token_ids=(), response=RESPONSE))
    replies, final = await able.final()
    seen = decode_observed((await able.far.take(observed)).body)

    assert replies == [final]
    assert isinstance(final, RequestCompleted)
    assert (final.response, final.token_ids, final.details) == (msgspec.Raw(RESPONSE), (), ())
    usage, verdict = final.usage, final.verdict
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (7, 0, 2)
    assert final.timings.first_token_at == pytest.approx(final.timings.finished_at, abs=0.02)
    assert (verdict.attained, verdict.late_tokens, verdict.max_tbt_s) == (attained, 0, 0.0)
    assert (seen.prompt_tokens, seen.output_tokens, seen.ignore_eos) == (7, 0, True)
    assert seen.prompt_text is not None
    assert seen.prompt_text.num_bytes == 6


async def test_evicted_call_begins_again(able: AgentRig):
    await run_called(able)
    assert not able.engine.requests[R].checkpointed
    returned = await able.evicted("r", lane_of(TARGET).resume_name)

    assert returned.call is not None
    assert returned.pools
    assert returned.progress.children == ()
