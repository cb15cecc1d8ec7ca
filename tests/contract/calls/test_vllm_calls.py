"""vLLM's application in an engine host renders calls and answers them, also across evictions."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.contracts.errors import ContractError
from shared.contracts.requests import FinishReason
from tests.contract.calls.call_cases import CASES, CHAT, COMPLETIONS, MESSAGES, TALK, TOOL
from tests.contract.calls.call_engines import CallRig, call_rig

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


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
    await rig.ask(COMPLETIONS, body, cut_after=4)
    await rig.settled()

    assert rig.engine.snapshot().running == 0
