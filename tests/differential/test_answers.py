"""Comparison of two answers."""

import pytest

from tests.differential.answers import Answer, difference
from tests.differential.cells import asked

BODY = next(body for body in asked(0, 80) if not body.cell.sampled)


def compared(field: str, expected: str, found: str) -> str | None:
    return difference(BODY, Answer(200, {field: expected}), Answer(200, {field: found}))


@pytest.mark.parametrize(
    "field",
    [
        "content_block_delta 0 input_json_delta",
        "response.function_call_arguments.delta 1",
        "x.arguments",
    ],
)
def test_empty_object_after_the_arguments_of_a_tool_is_ignored(field: str):
    assert compared(field, '{"count": 12', '{"count": 12{}') is None
    assert compared(field, '{"count": 12{}', '{"count": 12') is None
    assert compared(field, '{"count": 12', '{"count": 13{}') is not None
    assert compared(field, "", "{}") is None


def test_empty_object_after_text_is_reported():
    assert compared("text", "a", "a{}") == "answer.text is 'a{}' instead of 'a'"
