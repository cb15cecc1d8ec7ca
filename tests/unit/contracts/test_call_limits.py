"""Limits of bodies, and fields that agents send by themselves."""

from codecs import BOM_UTF8
from typing import Any

import msgspec
import pytest

from shared.api.calls import MOST_PARTS, call_fields, check_text, forwarded
from shared.api.digests import body_digest
from shared.contracts.checks import check_prompt
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import ChatMessage
from tests.clients.coding_agents import SESSION_FIELDS

MESSAGE = {"role": "user", "content": "hi"}


def fields_of(**body: Any) -> dict[str, msgspec.Raw]:
    return call_fields(msgspec.json.encode({"model": "m", **body}))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("messages", MESSAGE),
        ("prompt", "hi"),
        ("prompt", [1, 2]),
        ("input", "hi"),
        ("input", MESSAGE),
    ],
)
def test_many_parts_are_refused(name: str, part: object):
    fields_of(**{name: [part] * MOST_PARTS})
    with pytest.raises(ContractError, match="the limit is 4096") as refused:
        fields_of(**{name: [part] * (MOST_PARTS + 1)})
    assert (refused.value.code, refused.value.param) == ("too_many_parts", name)


@pytest.mark.parametrize("name", ["messages", "input", "system"])
def test_many_parts_of_contents_are_refused(name: str):
    part = {"type": "text", "text": "{" * 10}
    inner = [{"role": "user", "content": [part] * 100}] * 81
    fields_of(**{name: [{"role": "user", "content": [part] * 8191}]})
    fields_of(**{name: [{"role": "user", "content": "{" * 10_000}]})
    for value in ([{"role": "user", "content": [part] * 8192}], [*inner, *inner[:1]]):
        with pytest.raises(ContractError, match="the limit is 8192") as refused:
            fields_of(**{name: value})
        assert (refused.value.code, refused.value.param) == ("too_many_parts", name)


def test_many_parts_of_contents_of_a_plain_request_are_refused():
    many = ChatMessage(role="user", content=[{"type": "text", "text": "hi"}] * 8192)
    check_prompt(InferenceRequest(model="m", messages=(many,)))
    with pytest.raises(ContractError, match="the limit is 8192"):
        check_prompt(InferenceRequest(model="m", messages=(many, many)))


def test_long_text_is_refused_by_its_characters():
    check_text("prompt", msgspec.Raw(msgspec.json.encode("é" * 100)), 100)
    check_text("prompt", msgspec.Raw(b'"\\ud800' + b"a" * 200 + b'"'), 100)
    check_text("prompt", None, 100)
    check_text("prompt", msgspec.Raw(b"[" + b"1," * 200 + b"1]"), 100)
    with pytest.raises(ContractError, match="101 characters: at most 100 fit") as refused:
        check_text("prompt", msgspec.Raw(msgspec.json.encode("é" * 101)), 100)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_token_ids_are_no_parts(name: str):
    fields_of(**{name: list(range(100_000))})


@pytest.mark.parametrize("value", ["a" * 100_000, None, 7, {"a": [1] * 9000}, []])
def test_other_values_are_left_to_the_application(value: object):
    fields_of(prompt=value)


def test_many_messages_of_a_plain_request_are_refused():
    message = ChatMessage(role="user", content="hi")
    check_prompt(InferenceRequest(model="m", messages=(message,) * MOST_PARTS))
    with pytest.raises(ContractError, match="the limit is 4096"):
        check_prompt(InferenceRequest(model="m", messages=(message,) * (MOST_PARTS + 1)))


def test_fields_that_name_a_session_are_taken_and_not_forwarded():
    fields = fields_of(prompt="hi", **SESSION_FIELDS)
    assert msgspec.json.decode(forwarded(fields)) == {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"agentic_context": "a", "top_p_decay": 1}, "vllm_xargs.top_p_decay"),
        ({"a": 1}, "vllm_xargs.a"),
        ([1], "vllm_xargs"),
        ("x", "vllm_xargs"),
    ],
)
def test_other_arguments_of_the_engine_are_refused(arguments: object, param: str):
    with pytest.raises(ContractError, match="is not supported") as refused:
        fields_of(prompt="hi", vllm_xargs=arguments)
    assert refused.value.param == param


@pytest.mark.parametrize("arguments", [None, {}, [], False])
def test_arguments_that_ask_for_nothing_are_taken(arguments: object):
    fields_of(prompt="hi", vllm_xargs=arguments)


def test_a_byte_order_mark_is_ignored():
    assert call_fields(BOM_UTF8 + b'{"model": "m"}') == {"model": msgspec.Raw(b'"m"')}
    assert body_digest(BOM_UTF8 + b'{"model": "m"}') == body_digest(b'{"model":"m"}')
