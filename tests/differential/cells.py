"""
Request bodies for the comparison with vLLM's own server: cells, and seeded bodies of each cell.

A cell is an endpoint, the field that its bodies exercise, and whether the answer is streamed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

MODEL = "tiny-llama"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

Body = dict[str, Any]
Make = Callable[[Random], Body]

_WORDS = (
    *("queue", "engine", "token", "model", "batch", "prefix", "cache", "kernel", "router"),
    *("a", "the", "is", "waits", "moves", "returns", "shares", "über", "日本", "ok?", "1,234"),
)
_PICK: Body = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"type": "string", "enum": ["new", "old"]},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}
_TOOL: Body = {
    "type": "function",
    "function": {"name": "pick", "description": "Pick items", "parameters": _PICK, "strict": True},
}
_OTHER: Body = {
    "type": "function",
    "function": {
        "name": "drop",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
    },
}
_GRAMMAR = 'root ::= "yes" | "no" | "yes and " root'
_THINK = "<think>"


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of body."""

    endpoint: str
    field: str
    make: Make
    streamed: bool = False
    valid: bool = True
    sampled: bool = False
    """True if tokens are sampled at random: engines of the mesh draw them in a way of their own."""

    @property
    def name(self) -> str:
        kind = "stream" if self.streamed else "whole"
        return f"{self.endpoint} {self.field} {kind if self.valid else 'invalid'}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A body of a cell."""

    number: int
    cell: Cell
    body: Body


def words(random: Random, low: int = 2, high: int = 24) -> str:
    """Random text."""
    return " ".join(random.choices(_WORDS, k=random.randint(low, high)))


def _asking(prompt: Make, limit: str = "max_tokens") -> Callable[..., Body]:
    """
    Function that makes bodies.

    Args:
        prompt: Makes the fields of the prompt.
        limit: Name of the field that limits the answer.
    """

    def make(random: Random, **fields: Any) -> Body:
        asked = {"model": MODEL, **prompt(random), "temperature": 0}
        return _without_none(asked | {limit: random.randint(4, 20)} | fields)

    return make


def _user_message(random: Random) -> Body:
    return {"messages": [{"role": "user", "content": words(random)}]}


_chat = _message = _asking(_user_message)
_completion = _asking(lambda random: {"prompt": words(random)})
_response = _asking(lambda random: {"input": words(random)}, "max_output_tokens")


def _tokenize(random: Random, **fields: Any) -> Body:
    return _without_none({"model": MODEL, "prompt": words(random)} | fields)


def _detokenize(random: Random, **fields: Any) -> Body:
    return {"model": MODEL, "tokens": random.sample(range(8, 500), 7)} | fields


def _without_none(body: Body) -> Body:
    """*body* without the fields whose value is None, which a cell removes."""
    return {name: value for name, value in body.items() if value is not None}


def _fixed(make: Callable[..., Body], **fields: Any) -> Make:
    """Bodies of *make* with *fields*; callable values get the source of random numbers."""

    def body(random: Random) -> Body:
        chosen = {k: v(random) if callable(v) else v for k, v in fields.items()}
        return make(random, **chosen)

    return body


def _some_tokens(random: Random) -> list[int]:
    return random.sample(range(20, 500), 40)


_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Count the items."},
    {"role": "assistant", "content": "There are four."},
    {"role": "user", "content": "And now?"},
]
_TOOL_TURNS = [
    {"role": "user", "content": "Pick some."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "pick", "arguments": '{"count": 3, "kind": "new"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": '{"done": true}'},
]
_PLAIN_ANSWER: Body = {"chat_template_kwargs": {"enable_thinking": False}}
"""Without reasoning, so that the constraint applies from the first token."""
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": _PICK}}
_NAMED = {"type": "function", "function": {"name": "pick"}}

_GENERATION: dict[str, Body] = {
    "plain": {},
    "long prompt": {"max_tokens": 3},
    "one token": {"max_tokens": 1},
    "stop": {"stop": lambda random: random.sample(["e", "a", "is", " the", "o", "1"], 2)},
    "stop string": {"stop": "e"},
    "stop kept": {"stop": ["e", "a", "i"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": lambda random: random.sample(range(8, 500), 60)},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 4, "stop": ["e", "a", "i", "o"]},
    "bad_words": {"bad_words": ["e", "a", "the"]},
    "allowed_token_ids": {"allowed_token_ids": _some_tokens},
    "logit_bias": {"logit_bias": {"40": 100, "41": 99.5, "42": -100}},
    "presence_penalty": {"presence_penalty": 1.5, "max_tokens": 20},
    "frequency_penalty": {"frequency_penalty": 1.5, "max_tokens": 20},
    "repetition_penalty": {"repetition_penalty": 1.4, "max_tokens": 20},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
        "logit_bias": {"40": 100},
        "max_tokens": 20,
    },
    "n": {"n": 3},
    "return_token_ids": {"return_token_ids": True},
    "special tokens": {
        "skip_special_tokens": False,
        "ignore_eos": True,
        "logit_bias": {"4": 100, "5": 99},
    },
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 6},
    "cache_salt": {"cache_salt": "salt"},
    "user": {"user": "someone"},
    "regex": {"structured_outputs": {"regex": "[a-f]{3,9}-[0-9]{2}"}, "max_tokens": 30},
    "choice": {"structured_outputs": {"choice": ["left", "right", "up"]}, "max_tokens": 30},
    "grammar": {"structured_outputs": {"grammar": _GRAMMAR}, "max_tokens": 30},
    "json": {"structured_outputs": {"json": _PICK}, "max_tokens": 60},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "return_token_ids": True},
}
_SAMPLED: dict[str, Body] = {
    "temperature": {"temperature": 0.8, "seed": 11},
    "top_p": {"temperature": 1.0, "top_p": 0.7, "seed": 12},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 13},
    "min_p": {"temperature": 1.2, "min_p": 0.1, "seed": 14},
    "n sampled": {"temperature": 0.9, "n": 2, "seed": 15},
}
_CHAT_ONLY: dict[str, Body] = {
    "turns": {"messages": _TURNS},
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 7},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4},
    "n logprobs": {"logprobs": True, "top_logprobs": 2, "n": 2},
    "echo": {"echo": True, "add_generation_prompt": False, "messages": _TURNS[:3]},
    "continue_final_message": {
        "messages": _TURNS[:3],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools auto": _PLAIN_ANSWER | {"tools": [_TOOL, _OTHER], "tool_choice": "auto"},
    "tools required": _PLAIN_ANSWER
    | {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 80},
    "tools named": _PLAIN_ANSWER
    | {"tools": [_TOOL, _OTHER], "tool_choice": _NAMED, "max_tokens": 80},
    "tools none": {"tools": [_TOOL], "tool_choice": "none"},
    "tools n": _PLAIN_ANSWER
    | {"tools": [_TOOL], "tool_choice": "required", "n": 2, "max_tokens": 80},
    "tool result": {"messages": _TOOL_TURNS, "tools": [_TOOL]},
    "json_schema": _PLAIN_ANSWER | {"response_format": _SCHEMA, "max_tokens": 60},
    "json_object": _PLAIN_ANSWER | {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "text format": {"response_format": {"type": "text"}},
    "schema logprobs": _PLAIN_ANSWER
    | {"response_format": _SCHEMA, "max_tokens": 60, "logprobs": True},
    "reasoning": {
        "messages": [{"role": "user", "content": f"{_THINK} first"}],
        "logit_bias": {"9": 40},
        "max_tokens": 20,
    },
    "reasoning left out": {"include_reasoning": False, "max_tokens": 20},
    "reasoning schema": {"response_format": _SCHEMA, "max_tokens": 90, "logit_bias": {"9": 20}},
    "thinking_token_budget": {"thinking_token_budget": 4, "max_tokens": 20},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
}
_COMPLETION_ONLY: dict[str, Body] = {
    "token ids": {"prompt": lambda random: random.sample(range(20, 500), 9)},
    "prompts": {"prompt": lambda random: [words(random), words(random), words(random)]},
    "prompts n": {"prompt": ["one", "two"], "n": 2},
    "token id prompts": {"prompt": [[40, 41, 42], [50, 51]]},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "logprobs 0": {"logprobs": 0},
    "n logprobs": {"logprobs": 1, "n": 2},
    "default length": {"max_tokens": None},
}
_WHOLE_ONLY: dict[str, dict[str, Body]] = {
    CHAT: {"prompt_logprobs": {"prompt_logprobs": 2}},
    COMPLETIONS: {
        "prompt_logprobs": {"prompt_logprobs": 2},
        "echo logprobs": {"echo": True, "logprobs": 2},
    },
}
_STREAM_ONLY: Body = {
    "include_usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stream_interval": {"stream_interval": 3},
}
_FUNCTION = {"type": "function", "name": "pick", "parameters": _PICK, "strict": True}
_RESPONSE: dict[str, Body] = {
    "plain": {},
    "instructions": {"instructions": "Be brief."},
    "turns": {"input": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]},
    "schema": _PLAIN_ANSWER
    | {
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _PICK, "strict": True}},
        "max_output_tokens": 60,
    },
    "tools required": _PLAIN_ANSWER
    | {"tools": [_FUNCTION], "tool_choice": "required", "max_output_tokens": 80},
    "tools auto": {"tools": [_FUNCTION]},
    "metadata": {"metadata": {"a": "b"}},
}
_CLAUDE_TOOL = {"name": "pick", "description": "Pick", "input_schema": _PICK}
_MESSAGE: dict[str, Body] = {
    "plain": {},
    "system": {"system": "Be brief."},
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    "stop_sequences": {"stop_sequences": ["e", "a"]},
    "tools any": _PLAIN_ANSWER
    | {"tools": [_CLAUDE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 80},
    "tools auto": {"tools": [_CLAUDE_TOOL], "tool_choice": {"type": "auto"}},
    "top_k": {"top_k": 1},
}
_INVALID_GENERATION: dict[str, Body] = {
    "unknown model": {"model": "no-such-model"},
    "temperature negative": {"temperature": -1},
    "temperature text": {"temperature": "hot"},
    "top_p": {"top_p": 1.5},
    "top_k": {"top_k": -5},
    "min_p": {"min_p": 2},
    "presence_penalty": {"presence_penalty": 9},
    "repetition_penalty": {"repetition_penalty": 0},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -3},
    "max_tokens text": {"max_tokens": "many"},
    "min_tokens": {"min_tokens": 50, "max_tokens": 4},
    "n 0": {"n": 0},
    "n huge": {"n": 100000},
    "stream_options": {"stream_options": {"include_usage": True}},
    "logit_bias": {"logit_bias": {"100000": 1}},
    "allowed_token_ids": {"allowed_token_ids": []},
    "allowed_token_ids range": {"allowed_token_ids": [100000]},
    "regex": {"structured_outputs": {"regex": "("}},
    "two grammars": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "seed": {"seed": "x"},
    "stop": {"stop": [""]},
    "use_beam_search": {"use_beam_search": True},
}
_INVALID: dict[str, dict[str, Body]] = {
    CHAT: _INVALID_GENERATION
    | {
        "no messages": {"messages": []},
        "messages missing": {"messages": None},
        "messages text": {"messages": "hello"},
        "role": {"messages": [{"role": "robot", "content": "x"}]},
        "content": {"messages": [{"role": "user", "content": 5}]},
        "context": {"messages": [{"role": "user", "content": "word " * 5000}]},
        "top_logprobs alone": {"top_logprobs": 3},
        "top_logprobs": {"logprobs": True, "top_logprobs": 100},
        "tool_choice alone": {"tool_choice": "required"},
        "tool unknown": {
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "none"}},
        },
        "schema": {"response_format": {"type": "json_schema"}},
        "format": {"response_format": {"type": "poem"}},
        "image": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                    ],
                }
            ]
        },
        "generation prompt": {"continue_final_message": True},
    },
    COMPLETIONS: _INVALID_GENERATION
    | {
        "prompt missing": {"prompt": None},
        "prompt empty": {"prompt": ""},
        "prompt empty list": {"prompt": []},
        "prompt number": {"prompt": 5},
        "token range": {"prompt": [1, 2, 100000]},
        "token negative": {"prompt": [1, -2]},
        "context": {"prompt": "word " * 5000},
        "logprobs": {"logprobs": 100},
        "suffix": {"suffix": "end"},
        "echo stream": {"echo": True, "stream": True, "max_tokens": 0},
    },
    RESPONSES: {
        "unknown model": {"model": "no-such-model"},
        "input missing": {"input": None},
        "temperature": {"temperature": -1},
        "max_output_tokens": {"max_output_tokens": 0},
        "previous_response_id": {"previous_response_id": "resp_none"},
        "tools": {"tools": [{"type": "function"}]},
    },
    MESSAGES: {
        "unknown model": {"model": "no-such-model"},
        "no messages": {"messages": []},
        "max_tokens missing": {"max_tokens": None},
        "max_tokens": {"max_tokens": 0},
        "role": {"messages": [{"role": "robot", "content": "x"}]},
    },
    TOKENIZE: {"prompt missing": {"prompt": None}, "unknown model": {"model": "none"}},
    DETOKENIZE: {"tokens": {"tokens": "x"}, "token range": {"tokens": [100000]}},
}
_MAKERS: dict[str, Callable[..., Body]] = {
    CHAT: _chat,
    COMPLETIONS: _completion,
    RESPONSES: _response,
    MESSAGES: _message,
    TOKENIZE: _tokenize,
    DETOKENIZE: _detokenize,
}


def _cells() -> Iterator[Cell]:
    yield from _generation_cells(CHAT, _GENERATION | _CHAT_ONLY)
    yield from _generation_cells(COMPLETIONS, _GENERATION | _COMPLETION_ONLY)
    for endpoint, own in ((RESPONSES, _RESPONSE), (MESSAGES, _MESSAGE)):
        for streamed in (False, True):
            for field, values in own.items():
                yield Cell(endpoint, field, _fixed(_MAKERS[endpoint], **values), streamed)
    yield Cell(COUNT_TOKENS, "plain", _fixed(_message, temperature=None))
    yield Cell(TOKENIZE, "prompt", _tokenize)
    yield Cell(TOKENIZE, "messages", _fixed(_tokenize, prompt=None, messages=_TURNS))
    yield Cell(TOKENIZE, "strings", _fixed(_tokenize, return_token_strs=True))
    yield Cell(TOKENIZE, "no special tokens", _fixed(_tokenize, add_special_tokens=False))
    yield Cell(DETOKENIZE, "tokens", _detokenize)
    for endpoint, invalid in _INVALID.items():
        for field, values in invalid.items():
            yield Cell(endpoint, field, _fixed(_MAKERS[endpoint], **values), valid=False)


def _generation_cells(endpoint: str, fields: dict[str, Body]) -> Iterator[Cell]:
    """Cells of chats or completions, whole and streamed."""
    make = _MAKERS[endpoint]
    for streamed in (False, True):
        for field, values in fields.items():
            yield Cell(endpoint, field, _fixed(make, **values), streamed)
        for field, values in _SAMPLED.items():
            yield Cell(endpoint, field, _fixed(make, **values), streamed, sampled=True)
    for field, values in _WHOLE_ONLY[endpoint].items():
        yield Cell(endpoint, field, _fixed(make, **values))
    for field, values in _STREAM_ONLY.items():
        yield Cell(endpoint, field, _fixed(make, **values), streamed=True)


CELLS = tuple(_cells())


def asked(seed: int, number: int) -> list[Asked]:
    """
    Seeded bodies of random cells. Each cell has a body if there are as many bodies as cells.

    Args:
        seed: Selects cells and contents.
        number: Number of bodies.
    """
    random = Random(seed)
    numbers = count()
    chosen: list[Cell] = []
    while len(chosen) < number:
        chosen += random.sample(CELLS, len(CELLS))
    return [
        Asked(next(numbers), cell, cell.make(random) | ({"stream": True} if cell.streamed else {}))
        for cell in chosen[:number]
    ]
