"""Requests to pooling models on the engine: the answer comes in one piece and has no tokens."""

import pytest

from services.agent.aborting import end_run
from services.agent.state import Ending
from shared.api.pooling import NO_SAMPLING
from shared.broker import topology
from shared.contracts.qos import Slo
from shared.contracts.requests import (
    FinishReason,
    QueuedRequest,
    ReplyMode,
    RequestCompleted,
    StepDetails,
)
from tests.queued import a_request, lane_of
from tests.unit.agent.rig import REPLY, AgentRig, decode_observed, listen

pytestmark = pytest.mark.virtual_time

TARGET = Slo(ttlt_s=2.0)
VECTORS = (StepDetails(0, (b"first",)), StepDetails(0, (b"second", b"tensor")))


def pooled() -> QueuedRequest:
    return a_request(
        "r",
        slo=TARGET,
        prompt=(10, 11, 12),
        prompt_tokens=3,
        input_lengths=(1, 2),
        sampling=NO_SAMPLING,
        expected_tokens=0,
        reply_to=REPLY,
        reply_mode=ReplyMode.FINAL,
    )


async def test_final_has_the_output_of_each_input_and_no_tokens(rig: AgentRig):
    _, task = await rig.running(pooled())
    rig.clock.advance(1.0)
    rig.engine.emit("r", finish=FinishReason.STOP, details=VECTORS, cached_tokens=1)
    await task
    (final,) = await rig.replies()

    assert isinstance(final, RequestCompleted)
    assert (final.token_ids, final.text, final.details) == ((), "", VECTORS)
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (3, 0)
    assert final.finish_reason is FinishReason.STOP
    assert final.timings.first_token_at == final.timings.finished_at


@pytest.mark.parametrize(("taken_s", "attained"), [(1.0, True), (3.0, False)])
async def test_target_is_that_of_the_whole_answer(rig: AgentRig, taken_s: float, *, attained: bool):
    _, task = await rig.running(pooled())
    rig.clock.advance(taken_s)
    rig.engine.emit("r", finish=FinishReason.STOP, details=VECTORS)
    await task
    (final,) = await rig.replies()

    assert isinstance(final, RequestCompleted)
    assert final.verdict.attained is attained
    assert final.verdict.ttlt_s == taken_s
    assert (final.verdict.late_tokens, final.verdict.max_tbt_s) == (0, 0.0)


async def test_estimators_learn_the_prefill_and_no_length(rig: AgentRig):
    observed = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    _, task = await rig.running(pooled())
    rig.clock.advance(1.0)
    rig.engine.emit("r", finish=FinishReason.STOP, details=VECTORS)
    await task
    seen = decode_observed((await rig.far.take(observed)).body)

    assert (seen.output_tokens, seen.ignore_eos) == (0, True)
    assert seen.first_token_at - seen.submitted_at == 1.0


async def test_evicted_request_begins_again(rig: AgentRig):
    run, task = await rig.running(pooled())
    await rig.engine.began("r")
    end_run(rig.state, rig.engine, run, Ending.EVICTED)
    await task
    returned = await rig.requeued(lane_of(TARGET).resume_name)

    assert returned.input_lengths == (1, 2)
    assert (returned.progress.token_ids, returned.progress.details) == ((), ())
    assert returned.progress.first_token_at is None


async def test_room_is_that_of_the_prompt(rig: AgentRig):
    run, task = await rig.running(pooled())
    task.cancel()

    assert run.tokens_needed == 3
