"""Runs of calls: several answers, one request."""

import json

import msgspec
import pytest

from services.agent.aborting import end_run
from services.agent.backends.base import EngineCall, EngineOutput, EngineRequest
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.state import Ending
from shared.contracts.base import RequestId
from shared.contracts.errors import ContractError, UnsupportedError
from shared.contracts.requests import (
    ApiCall,
    ChildAnswer,
    FinishReason,
    Progress,
    QueuedRequest,
    ReplyMode,
    RunStarted,
    TokensEmitted,
)
from shared.models.registry import ModelRegistry
from shared.runtime.clock import SystemClock
from tests.brokers import eventually
from tests.queued import MODEL, a_request, lane_of, sampling
from tests.unit.agent.rig import REPLY, AgentRig
from tests.unit.agent.scripted_engine import AbleEngine
from tests.unit.agent.streamed import tokens_of

pytestmark = pytest.mark.virtual_time

RESUME = lane_of().resume_name
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
RESPONSE = b'{"id":"x","choices":[]}'


def a_call(request_id: str = "r", *, deltas: bool = False, **fields: object) -> QueuedRequest:
    """A call with two answers."""
    call = ApiCall(
        endpoint="/v1/completions",
        body=msgspec.Raw(b'{"prompt": "x", "n": 2}'),
        num_answers=2,
        deltas=deltas,
    )
    values = {"prompt": None, "sampling": sampling(40, seed=5), "reply_to": REPLY, "call": call}
    return a_request(request_id, **(values | fields))


def emit(engine: AbleEngine, child: int, *tokens: int, finish: FinishReason | None = None) -> None:
    engine.output("r", EngineOutput(token_ids=tokens, finish_reason=finish, child=child))


def render(engine: AbleEngine, *lengths: int) -> None:
    for child, length in enumerate(lengths):
        engine.output("r", EngineOutput(token_ids=(), child=child, prompt_tokens=length))


def respond(engine: AbleEngine) -> None:
    engine.output("r", EngineOutput(token_ids=(), response=RESPONSE))


async def test_final_has_the_response_and_all_answers(able: AgentRig, engine: AbleEngine):
    run, task = await able.running(a_call())
    sent = engine.requests[run.request.request_id]
    render(engine, 7, 0)
    emit(engine, 0, 20, 21)
    emit(engine, 1, 30, finish=STOP)
    emit(engine, 0, 22, finish=LENGTH)
    respond(engine)
    await task
    final = await able.completed()

    assert sent.call is not None
    assert (sent.call.endpoint, sent.call.seed, sent.prompt) == ("/v1/completions", 5, ())
    assert json.loads(sent.call.body) == {"prompt": "x", "n": 2}
    assert final.response == msgspec.Raw(RESPONSE)
    assert final.children == (
        ChildAnswer(token_ids=(20, 21, 22), finish_reason=LENGTH),
        ChildAnswer(token_ids=(30,), finish_reason=STOP),
    )
    assert (final.token_ids, final.text, final.finish_reason) == ((), "", LENGTH)
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (7, 4)


async def test_chunks_name_their_answer(able: AgentRig, engine: AbleEngine):
    _, task = await able.running(a_call())
    emit(engine, 1, 30)
    emit(engine, 0, 20, 21)
    emit(engine, 1, 31, finish=STOP)
    emit(engine, 0, finish=STOP)
    respond(engine)
    await task
    chunks = [
        (chunk.child, chunk.offset, chunk.token_ids, chunk.text)
        for reply in await able.replies()
        if isinstance(reply, TokensEmitted)
        for chunk in reply.chunks
    ]

    assert [each for each in chunks if each[0] == 0] == [(0, 0, (20, 21), "")]
    assert [each[:3] for each in chunks if each[0] == 1] in (
        [(1, 0, (30,)), (1, 1, (31,))],
        [(1, 0, (30, 31))],
    )


async def test_chunks_have_text_if_the_body_asks_for_a_stream(able: AgentRig, engine: AbleEngine):
    tokens = tokens_of(able, "naïve 日本")
    _, task = await able.running(a_call(deltas=True))
    emit(engine, 0, *tokens[:3])
    emit(engine, 0, *tokens[3:], finish=STOP)
    emit(engine, 1, *tokens, finish=STOP)
    respond(engine)
    await task

    assert [child.text for child in (await able.completed()).children] == ["naïve 日本"] * 2


async def test_lengths_are_corrected_once_all_prompts_are_rendered(
    able: AgentRig, engine: AbleEngine
):
    run, task = await able.running(a_call(prompt_tokens=1000))
    render(engine, 7)
    emit(engine, 0, 20)
    await eventually(lambda: run.answer.num_tokens == 1)
    assert run.request.prompt_tokens == 1000
    engine.output("r", EngineOutput(token_ids=(), child=1, prompt_tokens=4))
    emit(engine, 1, 30)
    await eventually(lambda: run.answer.num_tokens == 2)

    assert run.request.prompt_tokens == 11
    end_run(able.state, able.engine, run, Ending.EVICTED)
    await task
    assert (await able.requeued(RESUME)).prompt_tokens == 11


async def test_evicted_call_keeps_the_progress_of_each_answer(able: AgentRig, engine: AbleEngine):
    run, task = await able.running(a_call())
    emit(engine, 0, 20, 21)
    emit(engine, 1, 30, finish=STOP)
    await eventually(lambda: run.answer.num_tokens == 3)
    end_run(able.state, able.engine, run, Ending.EVICTED)
    await task
    resumed = await able.requeued(RESUME)
    first, second = resumed.progress.children
    assert (first.token_ids, first.finish_reason) == ((20, 21), None)
    assert (second.token_ids, second.finish_reason) == ((30,), STOP)
    await able.replies()

    _, task = await able.running(resumed)
    sent = engine.requests[resumed.request_id].call
    assert sent is not None
    assert sent.children == (first, second)
    render(engine, 7, 0)
    emit(engine, 0, 22, finish=LENGTH)
    respond(engine)
    await task
    replies = await able.replies()

    assert isinstance(replies[0], RunStarted)
    assert (replies[0].offset, replies[0].offsets) == (2, (2, 1))
    assert [child.token_ids for child in replies[-1].children] == [(20, 21, 22), (30,)]  # type: ignore[union-attr]
    assert [child.finish_reason for child in replies[-1].children] == [LENGTH, STOP]  # type: ignore[union-attr]


async def test_call_whose_response_was_lost_runs_again_with_complete_answers(
    able: AgentRig, engine: AbleEngine
):
    children = tuple(Progress(token_ids=(t,), finish_reason=STOP) for t in (20, 30))
    request = a_call(progress=Progress(first_token_at=1.0, children=children))
    _, task = await able.running(request)
    render(engine, 7, 0)
    respond(engine)
    await task

    assert [each.token_ids for each in (await able.completed()).children] == [(20,), (30,)]


async def test_crashed_call_is_requeued_with_its_progress(able: AgentRig, engine: AbleEngine):
    run, task = await able.running(a_call())
    emit(engine, 1, 30)
    await eventually(lambda: run.answer.num_tokens == 1)
    engine.die()
    await task
    resumed = await able.requeued(RESUME)

    assert resumed.attempts.crashes == 1
    assert [each.token_ids for each in resumed.progress.children] == [(), (30,)]


async def test_invalid_body_fails_with_the_status_and_field_of_vllm(
    able: AgentRig, engine: AbleEngine
):
    _, task = await able.running(a_call())
    engine.fail("r", ContractError("bad temperature", param="temperature", status=422))
    await task
    error = (await able.failed()).error

    assert (error.status, error.param, error.message) == (422, "temperature", "bad temperature")


async def test_engine_without_vllm_refuses_calls(rig: AgentRig):
    request = a_call()
    await rig.runner.run(rig.runner.begin(await rig.pulled(request)))
    error = (await rig.failed()).error

    assert (error.code, error.param) == ("unsupported_parameter", "endpoint")


async def test_simulated_engine_refuses_calls(registry: ModelRegistry):
    engine = SimulatedEngine(
        [registry.entry(MODEL)], SimulatedSettings(time_scale=0.0), SystemClock()
    )
    await engine.start()
    await engine.activate(MODEL)
    request = EngineRequest(
        request_id=RequestId("r"),
        model=MODEL,
        prompt=(),
        sampling=sampling(),
        call=EngineCall(endpoint="/v1/completions", body=b"{}", seed=0),
    )

    with pytest.raises(UnsupportedError):
        await anext(aiter(engine.generate(request)))
    await engine.close()


async def test_call_without_a_stream_gets_the_final_only(able: AgentRig, engine: AbleEngine):
    _, task = await able.running(a_call(reply_mode=ReplyMode.FINAL))
    emit(engine, 0, 20, finish=STOP)
    emit(engine, 1, 30, finish=STOP)
    respond(engine)
    await task

    assert len(await able.replies()) == 1
