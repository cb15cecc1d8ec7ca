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
    StepDetails,
)
from tests.agents.rig import REPLY, AgentRig, R, decode_observed, listen
from tests.queued import a_request, lane_of

pytestmark = pytest.mark.virtual_time

TARGET = Slo(ttlt_s=2.0)
RESPONSE = b'{"data":[]}'
VECTORS = (StepDetails(0, (b"first",)), StepDetails(0, (b"second", b"tensor")))


async def run_pooled(rig: AgentRig) -> None:
    """Run a request with two inputs."""
    request = a_request(
        "r",
        slo=TARGET,
        prompt=(10, 11, 12),
        prompt_tokens=3,
        input_lengths=(1, 2),
        sampling=NO_SAMPLING,
        expected_tokens=0,
        arrived_at=rig.clock.now(),
        reply_to=REPLY,
        reply_mode=ReplyMode.FINAL,
    )
    await rig.running(request)


@pytest.mark.parametrize(("taken_s", "attained"), [(1.0, True), (3.0, False)])
async def test_final_has_the_output_of_each_input_and_no_tokens(
    rig: AgentRig, taken_s: float, *, attained: bool
):
    """The target is that of the whole answer; estimators learn the prefill and no length."""
    observed = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    await run_pooled(rig)
    await asyncio.sleep(taken_s)
    rig.engine.emit("r", finish=FinishReason.STOP, details=VECTORS, cached_tokens=1)
    replies, final = await rig.final()
    seen = decode_observed((await rig.far.take(observed)).body)

    assert replies == [final]
    assert isinstance(final, RequestCompleted)
    assert (final.token_ids, final.text, final.details) == ((), "", VECTORS)
    usage, verdict = final.usage, final.verdict
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 0, 1)
    assert final.finish_reason is FinishReason.STOP
    assert final.timings.first_token_at == final.timings.finished_at
    assert (verdict.attained, verdict.late_tokens, verdict.max_tbt_s) == (attained, 0, 0.0)
    assert verdict.ttlt_s == pytest.approx(taken_s, abs=0.02)
    assert (seen.output_tokens, seen.ignore_eos) == (0, True)
    assert seen.first_token_at - seen.submitted_at == pytest.approx(taken_s, abs=0.02)


async def test_evicted_request_begins_again(rig: AgentRig):
    await run_pooled(rig)
    returned = await rig.evicted("r", lane_of(TARGET).resume_name)

    assert returned.input_lengths == (1, 2)
    assert (returned.progress.token_ids, returned.progress.details) == ((), ())
    assert returned.progress.first_token_at is None


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
async def test_call_is_counted_as_a_request_with_inputs_is(
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
