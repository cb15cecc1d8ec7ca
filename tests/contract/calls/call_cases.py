"""Bodies of calls that cover vLLM's endpoints and the kinds of their answers."""

from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "Say something about queues."}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA, "strict": True}}


@dataclass(frozen=True)
class Case:
    endpoint: str
    body: dict[str, Any]
    cuts: tuple[int, ...]
    """Numbers of tokens after which the call is evicted, one after another."""


CASES = {
    "chat": Case(CHAT, {"messages": TALK, "max_tokens": 9, "temperature": 0}, (1, 3)),
    "random chat": Case(CHAT, {"messages": TALK, "max_tokens": 9, "n": 2}, (5,)),
    "tool": Case(
        CHAT,
        {
            "messages": TALK,
            "max_tokens": 300,
            "temperature": 0,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "pick"}},
        },
        (2,),
    ),
    "schema": Case(
        CHAT,
        {
            "messages": TALK,
            "max_tokens": 300,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
            },
        },
        (3,),
    ),
    "logprobs": Case(
        CHAT,
        {
            "messages": TALK,
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        },
        (2, 2),
    ),
    "prompt logprobs": Case(
        COMPLETIONS,
        {"prompt": "hello", "max_tokens": 5, "temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
        (2,),
    ),
    "prompts": Case(
        COMPLETIONS,
        {"prompt": ["one", "two and a half"], "n": 3, "max_tokens": 6, "temperature": 0.7},
        (7, 11),
    ),
    "token ids": Case(
        COMPLETIONS,
        {"prompt": [10, 11, 12], "max_tokens": 6, "temperature": 0, "return_token_ids": True},
        (4,),
    ),
    "responses": Case(
        RESPONSES, {"input": "hello", "max_output_tokens": 7, "temperature": 0}, (3,)
    ),
    "messages": Case(MESSAGES, {"messages": TALK, "max_tokens": 7, "temperature": 0}, (3,)),
}
