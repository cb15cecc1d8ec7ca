"""The door refuses no body that vLLM accepts."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import SamplingParams

from shared.api.calls import call_fields
from shared.api.ranges import RANGES, check_ranges
from shared.contracts.errors import ContractError

NUM_BODIES = 5_000
"""Number of bodies of each endpoint."""
TURNS = [{"role": "user", "content": "x"}]
BASES = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
}
OTHERS = ("echo", "stream", "stream_options", "stop", "allowed_token_ids", "tools", "tool_choice")


def check(params: SamplingParams) -> None:
    """What vLLM checks when an engine has the parameters."""
    if params.allowed_token_ids == []:
        raise ValueError("allowed_token_ids is empty")


def chat(body: dict[str, Any]) -> None:
    request = ChatCompletionRequest.model_validate(body)
    limits = (request.max_completion_tokens, request.max_tokens, 16)
    limit = next(each for each in limits if each is not None)
    check(request.to_sampling_params(limit, {}))


def completion(body: dict[str, Any]) -> None:
    request = CompletionRequest.model_validate(body)
    limit = 16 if request.max_tokens is None else request.max_tokens
    check(request.to_sampling_params(limit, {}))


def response(body: dict[str, Any]) -> None:
    ResponsesRequest.model_validate(body).to_sampling_params(16, {})


def message(body: dict[str, Any]) -> None:
    request = AnthropicMessagesRequest.model_validate(body)
    names = ("temperature", "top_p", "top_k")
    chat(BASES["/v1/chat/completions"] | {name: getattr(request, name) for name in names})


READERS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/responses": response,
    "/v1/messages": message,
}


def value(random: Random) -> Any:
    """A value near the limits of the ranges, in one of the forms that pydantic may read."""
    number = random.choice((-5, -2, -1, -0.5, 0, 0.0, 0.5, 1, 1.0, 1.5, 2, 2.5, 4, 20, 16384))
    forms = (number, number, number, str(number), f" {number} ", f"{number}.0", float(number))
    others = (None, True, False, "x", "", "true", [], [number], [""], {}, {"a": 1}, "nan", "1e1")
    return random.choice((*forms, *forms, random.choice(others)))


def bodies(endpoint: str, random: Random) -> dict[str, Any]:
    names = [*RANGES[endpoint], *OTHERS]
    chosen = random.sample(names, random.randint(1, 4))
    return BASES[endpoint] | {"model": "m"} | {name: value(random) for name in chosen}


@pytest.mark.parametrize("endpoint", READERS)
def test_no_body_that_vllm_accepts_is_refused(endpoint: str):
    random, wrong, numbers = Random(0), [], {"accepted": 0, "refused": 0}
    for _ in range(NUM_BODIES):
        body = bodies(endpoint, random)
        try:
            READERS[endpoint](json.loads(json.dumps(body)))
        except Exception:  # noqa: BLE001 - vLLM raises many kinds of errors for invalid bodies
            is_accepted = False
        else:
            is_accepted = True
        try:
            check_ranges(endpoint, call_fields(json.dumps(body).encode()))
        except ContractError as error:
            numbers["refused"] += 1
            if is_accepted:
                wrong.append((body, str(error)))
        numbers["accepted"] += is_accepted

    assert wrong[:3] == []
    assert numbers["accepted"] >= NUM_BODIES / 10
    assert numbers["refused"] >= NUM_BODIES / 10
