"""vLLM's application in an engine host renders calls and answers them, also across evictions."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from services.agent.backends.base import EngineRequest
from shared.api.calls import EMBEDDINGS
from shared.contracts.base import RequestId
from shared.contracts.errors import ContractError
from shared.contracts.requests import FinishReason, Progress
from tests.contract.calls.call_cases import CASES, CHAT, COMPLETIONS, MESSAGES, TALK, TOOL
from tests.contract.calls.call_engines import EMBED, CallRig, Response, call_rig
from tests.contract.engine.engines import LLAMA, kill_cores
from tests.contract.pooling.pooling_engines import PoolingRig, Vector

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
INPUTS = [[10, 11, 12], [20, 21], [10, 11, 12]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CallRig]:
    async with call_rig(tmp_path_factory.mktemp("calls")) as opened:
        yield opened


@pytest.mark.parametrize("name", CASES)
async def test_response_is_the_same_after_evictions(rig: CallRig, name: str):
    case = CASES[name]
    whole = await rig.response(case.endpoint, case.body)
    children = ()
    for cut in case.cuts:
        evicted = await rig.ask(case.endpoint, case.body, children, cut_after=cut)
        assert evicted.response is None
        children = evicted.progress().children

    assert await rig.response(case.endpoint, case.body, children) == whole


@pytest.mark.parametrize("name", [name for name in CASES if name != "prompt logprobs"])
async def test_stream_is_the_same_after_evictions(rig: CallRig, name: str):
    """The events of known tokens are made again, with equal ids and times."""
    case, request = CASES[name], f"req-{name.replace(' ', '-')}"
    body = case.body | {"stream": True}
    whole = events_in(await rig.stream(case.endpoint, body, name=request, joins=False))
    cut = events_in(await rig.stream(case.endpoint, body, case.cuts, name=request, joins=False))

    assert sorted(cut) == sorted(whole)
    if "n" not in body and not isinstance(body.get("prompt"), list):
        assert cut == whole


async def test_layer_preemption_hears_of_calls(rig: CallRig, monkeypatch: pytest.MonkeyPatch):
    monitor = rig.engine._telemetry.monitor(LLAMA)
    assert monitor is not None
    arrived = []

    def note(_request: EngineRequest, run: RequestId, num_tokens: int) -> None:
        arrived.append((run.rpartition("/")[2], num_tokens))

    monkeypatch.setattr(monitor, "arrived", note)
    body = {"prompt": ["one", "two and a half"], "max_tokens": 2, "temperature": 0}
    answer = await rig.ask(COMPLETIONS, body)

    assert [run for run, _ in arrived] == ["0", "1"]
    assert sum(num_tokens for _, num_tokens in arrived) == answer.prompt_tokens


async def test_stream_with_other_events_than_those_sent_is_not_continued(rig: CallRig):
    """As if an engine with another template had begun the answer."""
    case = CASES["chat"]
    evicted = await rig.ask(case.endpoint, case.body, cut_after=3, events=True, name="req-other")
    (known,) = evicted.progress().children
    assert len(known.digest) == 16
    assert all(not step.events for step in known.details)

    other = (msgspec.structs.replace(known, digest=bytes(16)),)
    with pytest.raises(ContractError) as refused:
        await rig.ask(case.endpoint, case.body, other, events=True, name="req-other")
    assert (refused.value.code, refused.value.status) == ("events_differ", 502)


async def test_stream_reports_the_cached_tokens_of_its_first_run(rig: CallRig):
    body = {"messages": [{"role": "user", "content": "cached " * 60}], "max_tokens": 9}
    asked = body | {"stream_options": {"include_usage": True}}
    whole = await rig.stream(CHAT, asked, name="req-cached")
    cut = await rig.stream(CHAT, asked, (4,), name="req-cached")

    assert usage_in(cut) == usage_in(whole)


def usage_in(stream: bytes) -> Any:
    (usage,) = [
        json.loads(event.removeprefix(b"data: "))["usage"]
        for event in events_in(stream)
        if b'"choices":[]' in event
    ]
    return usage


def events_in(stream: bytes) -> list[bytes]:
    return [event for event in stream.split(b"\n\n") if event]


async def test_response_ends_before_a_stop_string(rig: CallRig):
    body = {"prompt": "once", "max_tokens": 30, "temperature": 0}
    text = (await rig.response(COMPLETIONS, body))["choices"][0]["text"]
    stopped = body | {"stop": [text[8:11]]}
    evicted = await rig.ask(COMPLETIONS, stopped, cut_after=2)
    (choice,) = (await rig.response(COMPLETIONS, stopped, evicted.progress().children))["choices"]

    assert choice["text"] == text[: text.index(text[8:11])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[8:11])


async def test_tool_is_called(rig: CallRig):
    case = CASES["tool"]
    (choice,) = (await rig.response(case.endpoint, case.body))["choices"]
    (call,) = choice["message"]["tool_calls"]

    assert call["function"]["name"] == "pick"
    assert 0 <= json.loads(call["function"]["arguments"])["x"] <= 99


async def test_several_answers_differ_and_repeat_with_the_seed_of_the_call(rig: CallRig):
    body = {"prompt": "hello", "n": 3, "max_tokens": 8, "temperature": 1.0}
    first, second = [await rig.response(COMPLETIONS, body) for _ in range(2)]

    assert len({choice["text"] for choice in first["choices"]}) == 3
    assert first == second


async def test_complete_answers_are_not_generated_again(rig: CallRig):
    case = CASES["prompts"]
    whole = await rig.ask(case.endpoint, case.body)
    children = whole.progress().children
    outputs = await rig.outputs(case.endpoint, case.body, children)

    assert all(child.finish_reason is FinishReason.LENGTH for child in children)
    assert [output.token_ids for output in outputs if output.token_ids] == []
    assert outputs[-1].response is not None


async def test_prompts_are_counted_when_they_are_rendered(rig: CallRig):
    case = CASES["prompts"]
    answer = await rig.ask(case.endpoint, case.body)
    assert answer.response is not None

    assert answer.prompt_tokens == json.loads(answer.response)["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, {"messages": TALK, "temperature": "hot"}, "body.temperature"),
        (CHAT, {"messages": TALK, "temperature": -1}, "temperature"),
        (CHAT, {"messages": "x"}, "body.messages"),
        (CHAT, {"messages": TALK, "tools": [TOOL], "tool_choice": "other"}, "tool_choice"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
        (COMPLETIONS, {"prompt": [10**6]}, None),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, None),
        (MESSAGES, {"messages": TALK}, "body.max_tokens"),
    ],
)
async def test_invalid_body_is_refused_with_the_field_of_vllm(
    rig: CallRig, endpoint: str, body: dict[str, Any], param: str | None
):
    with pytest.raises(ContractError) as refused:
        await rig.ask(endpoint, body)

    assert (refused.value.status, refused.value.param) == (400, param)


async def test_aborted_call_leaves_nothing_in_the_engine(rig: CallRig):
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 3000, "ignore_eos": True}
    rig.engine.drain_iterations()
    await rig.ask(COMPLETIONS, body, cut_after=4)
    await rig.settled()

    assert rig.engine.snapshot().running == 0
    # Without the abort, the answer ends as well, but with all of its tokens.
    assert sum(each.num_decodes for each in rig.engine.drain_iterations()) < 3000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(rig: CallRig) -> CallRig:
    """The engine, on which the pooling model is active for the rest of the module."""
    await rig.settled()
    await rig.engine.activate(EMBED)
    return CallRig(rig.engine, EMBED)


def vectors_in(response: Response) -> Vector:
    return np.array([each["embedding"] for each in response["data"]], np.float32)


def close(one: Vector, other: Vector) -> bool:
    return bool(np.allclose(one, other, rtol=0, atol=1e-5))


async def test_embeddings_are_the_vectors_of_the_engine(embedder: CallRig):
    engine = PoolingRig(embedder.engine, partial(kill_cores, embedder.engine))
    expected = await engine.vectors(*map(tuple, INPUTS))
    answer = await embedder.ask(EMBEDDINGS, {"input": INPUTS})
    assert answer.response is not None
    response = json.loads(answer.response)

    assert close(vectors_in(response), expected)
    assert [each["index"] for each in response["data"]] == [0, 1, 2]
    assert answer.prompt_tokens == response["usage"]["prompt_tokens"] == 8
    assert (answer.num_tokens, answer.finish_reason) == (0, FinishReason.STOP)


async def test_embeddings_of_text_and_of_conversations_count_their_tokens(embedder: CallRig):
    for body in ({"input": ["one", "two and a half"]}, {"messages": TALK}):
        answer = await embedder.ask(EMBEDDINGS, body)
        assert answer.response is not None

        assert answer.prompt_tokens == json.loads(answer.response)["usage"]["prompt_tokens"] > 1


async def test_embeddings_in_base64_are_those_in_numbers(embedder: CallRig):
    body = {"input": INPUTS}
    expected = vectors_in(await embedder.response(EMBEDDINGS, body))
    packed = await embedder.response(EMBEDDINGS, body | {"encoding_format": "base64"})
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed["data"]]

    assert close(np.array(rows), expected)


async def test_embeddings_are_cut_to_the_dimensions(embedder: CallRig):
    whole = vectors_in(await embedder.response(EMBEDDINGS, {"input": INPUTS}))
    cut = vectors_in(await embedder.response(EMBEDDINGS, {"input": INPUTS, "dimensions": 8}))

    assert cut.shape == (3, 8)
    assert close(cut, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True))


async def test_embeddings_are_made_again_in_the_next_run(embedder: CallRig):
    """An input has no progress, whatever an earlier run has reported."""
    children = (Progress(finish_reason=FinishReason.STOP),)
    expected = vectors_in(await embedder.response(EMBEDDINGS, {"input": INPUTS}))

    assert close(
        vectors_in(await embedder.response(EMBEDDINGS, {"input": INPUTS}, children)), expected
    )


async def test_aborted_embeddings_leave_nothing_in_the_engine(embedder: CallRig):
    many = [[10 + number] * 200 for number in range(300)]
    running = asyncio.create_task(embedder.outputs(EMBEDDINGS, {"input": many}, ()))
    async with asyncio.timeout(30):
        while not embedder.engine.snapshot().running:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await embedder.settled()
    again = vectors_in(await embedder.response(EMBEDDINGS, {"input": INPUTS}))

    assert again.shape == (3, 128)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, None),
        ({"input": "word " * 5000}, "input_tokens"),
        ({"input": [[10, 10**6]]}, None),
        ({"input": INPUTS, "dimensions": 9}, None),
        ({"input": INPUTS, "encoding_format": "none"}, "body.encoding_format"),
    ],
    ids=["no input", "too long", "unknown token", "other dimensions", "unknown encoding"],
)
async def test_invalid_embeddings_are_refused_as_vllm_does(
    embedder: CallRig, body: dict[str, Any], param: str | None
):
    with pytest.raises(ContractError) as refused:
        await embedder.ask(EMBEDDINGS, body)

    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(vectors_in(await embedder.response(EMBEDDINGS, {"input": INPUTS}))) == 3


async def test_pooling_model_has_no_route_for_text(embedder: CallRig):
    with pytest.raises(ContractError) as refused:
        await embedder.ask(COMPLETIONS, {"prompt": "x"})

    assert refused.value.status == 404
