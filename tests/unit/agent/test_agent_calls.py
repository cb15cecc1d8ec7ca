"""Runs of calls: several answers, one request."""

import json

import msgspec
import pytest

from services.agent.backends.base import EngineOutput
from shared.contracts.errors import ContractError
from shared.contracts.requests import (
    ApiCall,
    ChildAnswer,
    FinishReason,
    Progress,
    QueuedRequest,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    StepDetails,
)
from tests.agents.rig import REPLY, AgentRig, R
from tests.agents.streamed import chunks_of, tokens_of
from tests.queued import a_request, sampling

pytestmark = pytest.mark.virtual_time

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
RESPONSE = b'{"id":"x","choices":[]}'


def a_call(*, deltas: bool = False, **fields: object) -> QueuedRequest:
    """A call with two answers."""
    body = msgspec.Raw(b'{"prompt": "x", "n": 2}')
    call = ApiCall(endpoint="/v1/completions", body=body, num_answers=2, deltas=deltas)
    values = {"prompt": None, "sampling": sampling(40, seed=5), "reply_to": REPLY, "call": call}
    return a_request("r", **(values | fields))


def emit(rig: AgentRig, child: int, *tokens: int, finish: FinishReason | None = None) -> None:
    rig.engine.output("r", EngineOutput(token_ids=tokens, finish_reason=finish, child=child))


def render(rig: AgentRig, *lengths: int, first: int = 0) -> None:
    for child, length in enumerate(lengths, start=first):
        rig.engine.output("r", EngineOutput(token_ids=(), child=child, prompt_tokens=length))


async def responded(rig: AgentRig) -> RequestCompleted:
    """The final reply after the engine's response."""
    rig.engine.output("r", EngineOutput(token_ids=(), response=RESPONSE))
    return await rig.completed()


def children_of(rig: AgentRig) -> tuple[Progress, ...]:
    """Progress of the answers that the engine has received."""
    call = rig.engine.requests[R].call
    assert call is not None
    return call.children


async def test_final_has_the_response_and_all_answers(able: AgentRig):
    await able.running(a_call())
    sent = able.engine.requests[R]
    render(able, 7, 0)
    emit(able, 0, 20, 21)
    emit(able, 1, 30, finish=STOP)
    emit(able, 0, 22, finish=LENGTH)
    final = await responded(able)

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


@pytest.mark.parametrize("deltas", [False, True])
async def test_chunks_name_their_answer_and_have_text_if_asked_for(able: AgentRig, *, deltas: bool):
    tokens = tokens_of(able, "naïve 日本")
    await able.running(a_call(deltas=deltas))
    emit(able, 1, *tokens[:3])
    await able.settled()
    emit(able, 0, 20, 21)
    emit(able, 1, *tokens[3:], finish=STOP)
    emit(able, 0, finish=STOP)
    able.engine.output("r", EngineOutput(token_ids=(), response=RESPONSE))
    replies, final = await able.final()
    chunks = chunks_of(replies)
    text = "naïve 日本" if deltas else ""

    assert [(each.child, each.offset, each.token_ids) for each in chunks] == [
        (1, 0, tokens[:3]),
        (0, 0, (20, 21)),
        (1, 3, tokens[3:]),
    ]
    assert "".join(each.text for each in chunks if each.child == 1) == text
    assert isinstance(final, RequestCompleted)
    assert final.children[1].text == text


async def test_final_with_events_is_preceded_by_no_further_tokens(able: AgentRig):
    """They are in the final, which would only come later."""
    events = tuple(StepDetails(1, (f"data: {number}".encode(),)) for number in range(3))
    await able.running(a_call(deltas=True))
    emit(able, 0, 20)
    await able.settled()
    emit(able, 0, 21)
    emit(able, 0, 22, finish=STOP)
    able.engine.output("r", EngineOutput(token_ids=(), response=RESPONSE, details=events))
    replies, final = await able.final()

    assert [each.token_ids for each in chunks_of(replies)] == [(20,)]
    assert isinstance(final, RequestCompleted)
    assert final.details == events
    assert final.children[0].token_ids == (20, 21, 22)


async def test_tokens_precede_the_refusal_of_an_answer_that_is_too_large(able: AgentRig):
    events = (StepDetails(1, (b"data: " + b"x" * 10_000,)),)
    able.broker.max_message_size = 5_000
    await able.running(a_call(deltas=True))
    emit(able, 0, 20)
    await able.settled()
    emit(able, 0, 21, finish=STOP)
    able.engine.output("r", EngineOutput(token_ids=(), response=RESPONSE, details=events))
    replies, final = await able.final()

    assert [each.token_ids for each in chunks_of(replies)] == [(20,), (21,)]
    assert isinstance(final, RequestFailed)
    assert final.error.code == "answer_too_large"


async def test_lengths_are_corrected_once_all_prompts_are_rendered(able: AgentRig):
    await able.running(a_call(prompt_tokens=1000))
    held = able.instance.requests.find(R)
    assert held is not None
    render(able, 7)
    emit(able, 0, 20)
    assert held.request.prompt_tokens == 1000

    render(able, 4, first=1)
    emit(able, 1, 30)

    assert held.request.prompt_tokens == 11
    assert (await able.evicted("r")).prompt_tokens == 11


async def test_evicted_call_keeps_the_progress_of_each_answer(able: AgentRig):
    await able.running(a_call())
    emit(able, 0, 20, 21)
    emit(able, 1, 30, finish=STOP)
    resumed = await able.evicted("r")
    first, second = resumed.progress.children
    await able.replies()
    await able.running(resumed)
    (started,) = await able.replies()
    children = children_of(able)
    render(able, 7, 0)
    emit(able, 0, 22, finish=LENGTH)
    final = await responded(able)

    assert children == (first, second)
    assert (first.token_ids, first.finish_reason) == ((20, 21), None)
    assert (second.token_ids, second.finish_reason) == ((30,), STOP)
    assert isinstance(started, RunStarted)
    assert (started.offset, started.offsets) == (2, (2, 1))
    assert [child.token_ids for child in final.children] == [(20, 21, 22), (30,)]
    assert [child.finish_reason for child in final.children] == [LENGTH, STOP]


async def test_call_whose_response_was_lost_runs_again_with_complete_answers(able: AgentRig):
    children = tuple(Progress(token_ids=(t,), finish_reason=STOP) for t in (20, 30))
    await able.running(a_call(progress=Progress(first_token_at=1.0, children=children)))
    render(able, 7, 0)

    assert [each.token_ids for each in (await responded(able)).children] == [(20,), (30,)]


async def test_crashed_call_resumes_with_the_progress_of_each_answer(able: AgentRig):
    await able.running(a_call())
    emit(able, 1, 30)
    able.engine.die()
    await able.engine.began("r")

    assert [each.token_ids for each in children_of(able)] == [(), (30,)]


async def test_invalid_body_fails_with_the_status_and_field_of_vllm(able: AgentRig):
    await able.running(a_call())
    able.engine.end("r", ContractError("bad temperature", param="temperature", status=422))
    error = (await able.failed()).error

    assert (error.status, error.param, error.message) == (422, "temperature", "bad temperature")


async def test_an_engine_that_answers_no_bodies_refuses_calls(rig: AgentRig):
    await rig.put(a_call())
    error = (await rig.failed()).error

    assert (error.code, error.param) == ("unsupported_parameter", "endpoint")
