"""Bodies that no engine accepts are refused at once, and no others."""

import contextlib
import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.api.calls import call_fields
from shared.api.ranges import CHAT, MESSAGES, RANGES, check_ranges
from shared.contracts.errors import ContractError
from tests.differential.cells import CELLS

TURNS = [{"role": "user", "content": "x"}]


def refusal(endpoint: str, body: dict[str, Any]) -> ContractError | None:
    """The error for a body; None if it passes."""
    try:
        check_ranges(endpoint, call_fields(json.dumps(body).encode()))
    except ContractError as error:
        return error
    return None


def test_valid_cells_pass_and_most_invalid_ones_are_refused():
    refused = [cell for cell in CELLS if refusal(cell.endpoint, asked(cell))]

    assert [cell for cell in refused if cell.valid] == []
    assert len(refused) >= 40


def asked(cell: Any) -> dict[str, Any]:
    body: dict[str, Any] = cell.make(Random(0))
    return body | ({"stream": True} if cell.streamed else {})


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"temperature": -1}, "temperature must be at least 0, got -1", "temperature"),
        ({"temperature": "hot"}, "temperature must be a number", "body.temperature"),
        ({"temperature": [1]}, "temperature must be a number", "body.temperature"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5", "top_p"),
        ({"top_p": "0"}, "top_p must be in (0, 1], got 0", "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than 0, got 0", None),
        ({"n": 0}, "n must be in [1, 16384], got 0", None),
        ({"n": 1.5}, "n must be a whole number, got 1.5", "body.n"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0", "max_tokens"),
        (
            {"min_tokens": 9, "max_tokens": 4},
            "min_tokens must be at most max_tokens=4, got 9",
            None,
        ),
        ({"messages": []}, "messages is empty: send at least one message", None),
        ({"messages": "hi"}, "messages must be a list", "body.messages"),
        ({"messages": None}, "messages is missing", "body.messages"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options need stream=true",
            "stream_options",
        ),
        ({"stop": [""]}, "stop must not be an empty string", None),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty", "allowed_token_ids"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    ],
)
def test_error_names_the_field_and_the_limit(
    fields: dict[str, Any], message: str, param: str | None
):
    error = refusal(CHAT, {"messages": TURNS} | fields)

    assert error is not None
    assert (str(error), error.param, error.status) == (message, param, 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "0.5", "top_p": " 1 ", "n": "2", "max_tokens": 3.0, "seed": "7"},
        {"temperature": True, "n": True},
        {"temperature": None, "max_tokens": None, "stop": None, "stream_options": None},
        {"stream": "true", "stream_options": {"include_usage": True}},
        {"min_tokens": 5, "max_tokens": 4, "max_completion_tokens": 9},
    ],
)
def test_values_that_pydantic_reads_pass(fields: dict[str, Any]):
    assert refusal(CHAT, {"messages": TURNS} | fields) is None


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e400", '"\\ud800"', "NaN0"])
@pytest.mark.parametrize("field", ["seed", "stop", "max_tokens", "temperature"])
def test_strange_values_are_no_fault_of_the_check(field: str, value: str):
    fields = {"messages": msgspec.Raw(b'[{"role":"user","content":"x"}]')}
    with contextlib.suppress(ContractError):
        check_ranges(CHAT, fields | {field: msgspec.Raw(value.encode())})


def test_echo_without_an_answer_passes():
    body = {"prompt": "x", "echo": True, "max_tokens": 0}
    assert refusal("/v1/completions", body) is None


def test_limit_of_a_message_is_left_to_vllm():
    assert refusal(MESSAGES, {"messages": TURNS, "max_tokens": 0}) is None


@given(
    endpoint=st.sampled_from(sorted(RANGES)),
    fields=st.dictionaries(
        st.sampled_from(sorted({name for each in RANGES.values() for name in each})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2),
            max_leaves=3,
        ),
    ),
)
def test_any_body_passes_or_is_refused(endpoint: str, fields: dict[str, Any]):
    body = msgspec.json.encode({"messages": TURNS, "prompt": "x", "input": "x"} | fields)
    with contextlib.suppress(ContractError):
        check_ranges(endpoint, call_fields(body))
