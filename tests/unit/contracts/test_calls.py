"""Checks of bodies in the form of HTTP, before vLLM's application reads them."""

import json
from typing import Any

import msgspec
import pytest

from shared.api.calls import EMBEDDINGS, CallSize, call_fields, call_size
from shared.contracts.errors import ContractError
from shared.contracts.requests import ApiCall, PromptText

TALK = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("value", ["5", '"a"', "[[]]", "true"])
def test_structured_outputs_must_be_an_object(value: str):
    with pytest.raises(ContractError, match="structured_outputs must be an object") as caught:
        call_fields(f'{{"model": "m", "structured_outputs": {value}}}'.encode())
    assert (caught.value.param, caught.value.status) == ("structured_outputs", 400)


@pytest.mark.parametrize("value", ["null", '{"choice": ["a"]}', ' {"choice": ["a"]}'])
def test_an_object_and_null_pass(value: str):
    body = f'{{"model": "m", "structured_outputs": {value}}}'.encode()
    assert call_fields(body).keys() == {"model", "structured_outputs"}


@pytest.mark.parametrize("value", [b'"\xff"', b'["\xe4"]', b'{"text": "\xc3"}'])
def test_text_must_be_utf_8(value: bytes):
    with pytest.raises(ContractError, match="utf-8") as caught:
        call_fields(b'{"model": "m", "input": ' + value + b"}")
    assert (caught.value.code, caught.value.status) == ("invalid_json", 400)


def size_of(body: dict[str, Any]) -> CallSize:
    return call_size(ApiCall(endpoint=EMBEDDINGS, body=msgspec.Raw(json.dumps(body).encode())))


@pytest.mark.parametrize(
    ("body", "inputs", "num_bytes", "messages", "ids"),
    [
        ({"input": "über"}, 1, 5, 0, 0),
        ({"input": ["one", "two", "two"]}, 3, 9, 0, 0),
        ({"input": [10, 11, 12]}, 1, 0, 0, 3),
        ({"input": [[10, 11], [12]]}, 2, 0, 0, 3),
        ({"messages": [TALK, TALK]}, 1, 10, 2, 0),
        ({"messages": [[TALK], [TALK, TALK]]}, 2, 15, 3, 0),
        ({"input": [TALK]}, 1, 5, 1, 0),
        ({"input": [[TALK], [TALK]]}, 2, 10, 2, 0),
        ({"input": []}, 1, 0, 0, 0),
        ({"input": {"text": "abc"}}, 1, 3, 0, 0),
        ({}, 1, 0, 0, 0),
    ],
)
def test_inputs_of_embeddings_are_counted_in_each_form(
    body: dict[str, Any], inputs: int, num_bytes: int, messages: int, ids: int
):
    size = size_of(body)
    text = PromptText(num_bytes=num_bytes, num_messages=messages) if num_bytes else None

    assert (size.num_prompts, size.text, size.prompt_tokens) == (inputs, text, ids)
    assert size.num_answers == 1
