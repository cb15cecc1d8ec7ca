"""What bodies ask of stored responses, and what the front gets."""

from typing import Any

import msgspec
import pytest

from services.gateway.responses.asked import (
    check_turns,
    front_body,
    names_the_store,
    parse_asked,
)
from shared.contracts.errors import ContractError
from shared.store.objects.responses import StoredResponse
from tests.stores import a_response


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "input": "hello"} | fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"store": False, "background": False, "previous_response_id": None}, False),
        ({"store": True}, True),
        ({"background": True}, True),
        ({"previous_response_id": "resp_1"}, True),
        ({"background": "yes"}, True),
    ],
)
def test_only_bodies_that_name_a_field_of_the_store_are_taken(
    fields: dict[str, Any], expected: object
):
    assert names_the_store(body(**fields)) is expected


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff"])
def test_other_bodies_are_left_to_the_front(raw: bytes):
    assert not names_the_store(raw)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (body(background="yes"), "background"),
        (body(store=1), "store"),
        (body(previous_response_id=7), "previous_response_id"),
        (body(input=7), "input"),
        (b'{"model":"m"}', "input"),
        (b'{"input":"x"}', "model"),
        (body(background=True, store=False), "store"),
    ],
)
def test_invalid_fields_are_refused_by_name(raw: bytes, param: str):
    with pytest.raises(ContractError) as refused:
        parse_asked(raw)

    assert refused.value.param == param


def test_the_front_gets_a_stream_without_the_fields_of_the_store():
    raw = body(store=True, background=True, temperature=0.5, stream=False)

    assert msgspec.json.decode(front_body(raw, ())) == {
        "model": "m",
        "input": "hello",
        "temperature": 0.5,
        "stream": True,
    }
    assert msgspec.json.decode(front_body(raw, (), stream=None))["stream"] is False


def turn(asked_input: Any, output: list[Any], **fields: object) -> StoredResponse:
    return a_response(
        asked=body(input=asked_input),
        object=msgspec.json.encode({"output": output}),
        status="completed",
        **fields,
    )


def test_earlier_turns_are_input_in_order_without_nulls():
    text = {"type": "output_text", "text": "4", "logprobs": None}
    answer = {"type": "message", "role": "assistant", "content": [text], "status": None}
    turns = [turn("2+2?", [answer]), turn([{"role": "user", "content": "sure?"}], [])]

    made = msgspec.json.decode(front_body(body(input="why?"), turns))

    assert made["input"] == [
        {"type": "message", "role": "user", "content": "2+2?"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "4"}],
        },
        {"role": "user", "content": "sure?"},
        {"type": "message", "role": "user", "content": "why?"},
    ]


def test_a_response_continues_one_with_an_answer():
    first = turn("a", [])

    check_turns([first, turn("b", [], previous_response_id=first.id)], "x")


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        ([], "previous_response_not_found"),
        ([turn("b", [], previous_response_id="resp_gone")], "previous_response_not_found"),
        ([a_response(status="in_progress")], "previous_response_not_usable"),
        ([a_response(status="failed")], "previous_response_not_usable"),
    ],
    ids=["unknown", "an earlier turn is deleted", "it still runs", "it has failed"],
)
def test_others_are_refused(turns: list[StoredResponse], code: str):
    with pytest.raises(ContractError) as refused:
        check_turns(turns, "resp_x")

    assert (refused.value.code, refused.value.param) == (code, "previous_response_id")
