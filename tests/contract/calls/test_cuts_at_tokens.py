"""Streams that are cut at a token continue with the events of the uncut stream."""

import os
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.calls.call_cases import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    TALK,
    TOOL,
)
from tests.contract.calls.call_engines import CallRig, call_rig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
CUTS = (1, 2, 3, 7, 20)
NUM_CUTS = int(os.environ.get("HEADWAY_CUTS", "0"))
"""Number of first tokens at each of which a stream is cut; 0: at those of `CUTS`."""
MESSAGE_TOOL = {"name": "pick", "input_schema": SCHEMA}
RESPONSE_TOOL = {"type": "function", "name": "pick", "parameters": SCHEMA, "strict": True}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": TALK, "max_tokens": 45, "temperature": 0}),
    "chat with a seed": (CHAT, {"messages": TALK, "max_tokens": 45, "seed": 5}),
    "random chat": (CHAT, {"messages": TALK, "max_tokens": 45, "temperature": 1.2}),
    "chat with usage": (
        CHAT,
        {"messages": TALK, "max_tokens": 45, "stream_options": {"include_usage": True}},
    ),
    "chat with log probabilities": (
        CHAT,
        {"messages": TALK, "max_tokens": 45, "logprobs": True, "top_logprobs": 2},
    ),
    "named tool": (
        CHAT,
        {
            "messages": TALK,
            "max_tokens": 60,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "pick"}},
        },
    ),
    "required tool": (
        CHAT,
        {"messages": TALK, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
    ),
    "tool at will": (CHAT, {"messages": TALK, "max_tokens": 45, "tools": [TOOL]}),
    "schema": (CHAT, {"messages": TALK, "max_tokens": 60, "response_format": FORMAT}),
    "stop string": (CHAT, {"messages": TALK, "max_tokens": 45, "stop": ["zqx", "e"]}),
    "several answers": (CHAT, {"messages": TALK, "max_tokens": 20, "n": 3}),
    "completion": (COMPLETIONS, {"prompt": "once", "max_tokens": 45}),
    "completion of ids": (
        COMPLETIONS,
        {"prompt": [10, 11, 12], "max_tokens": 45, "return_token_ids": True},
    ),
    "completion with log probabilities": (
        COMPLETIONS,
        {"prompt": "once", "max_tokens": 45, "logprobs": 2},
    ),
    "several prompts": (COMPLETIONS, {"prompt": ["one", "two"], "max_tokens": 25, "n": 2}),
    "response": (RESPONSES, {"input": "hello", "max_output_tokens": 45}),
    "response with a tool": (
        RESPONSES,
        {
            "input": "hello",
            "max_output_tokens": 60,
            "tools": [RESPONSE_TOOL],
            "tool_choice": "required",
        },
    ),
    "response with instructions": (
        RESPONSES,
        {"input": "hello", "instructions": "be short", "max_output_tokens": 45, "temperature": 0},
    ),
    "message": (MESSAGES, {"messages": TALK, "max_tokens": 45}),
    "message with a tool": (
        MESSAGES,
        {
            "messages": TALK,
            "max_tokens": 60,
            "tools": [MESSAGE_TOOL],
            "tool_choice": {"type": "tool", "name": "pick"},
        },
    ),
}
_TIMES = re.compile(rb'"completed_at":\d+')
"""Times that a response has when it is complete, by the clock of the engine's host."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[None, "qwen3"], ids=["no parser", "reasoning"]
)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CallRig]:
    directory = tmp_path_factory.mktemp("cuts")
    async with call_rig(directory, reasoning_parser=request.param) as opened:
        yield opened


@pytest.mark.parametrize("name", BODIES)
async def test_stream_that_is_cut_at_a_token_has_the_events_of_the_whole_stream(
    rig: CallRig, name: str
):
    """`HEADWAY_CUTS=40` cuts at each of the first 40 tokens."""
    endpoint, fields = BODIES[name]
    body = {"ignore_eos": True, **fields} if endpoint in (CHAT, COMPLETIONS) else fields
    request = f"req-{name.replace(' ', '-')}"
    whole = await rig.stream(endpoint, body, name=request, joins=False)
    number = await rig.num_tokens(endpoint, body, name=request)
    cuts = [cut for cut in (range(1, NUM_CUTS + 1) if NUM_CUTS else CUTS) if cut < number]
    unequal = [
        cut
        for cut in cuts
        if events_of(await rig.stream(endpoint, body, (cut,), name=request, joins=False))
        != events_of(whole)
    ]

    assert len(cuts) >= 1
    assert unequal == []


def events_of(stream: bytes) -> list[bytes]:
    """Events of a stream; those of several answers may come in any order."""
    events = [event for event in _TIMES.sub(b"", stream).split(b"\n\n") if event]
    has_several = any(b'"index":1' in event and b'"choices"' in event for event in events)
    return sorted(events) if has_several else events
