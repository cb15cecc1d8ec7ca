"""Reading of servers' streams and responses."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.backends.remote.deltas import Delta, Lengths, read, refusal
from shared.api.events import EventSplitter, data_of, response_of
from shared.contracts.errors import ContractError, NotActiveError
from shared.contracts.requests import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def encoded(content: Any) -> bytes:
    return json.dumps(content).encode()


@given(
    texts=st.lists(st.text(alphabet="ab\r", min_size=1, max_size=9), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    newline=st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_do_not_depend_on_the_packets(
    texts: list[str], cuts: list[int], newline: bytes
) -> None:
    data = [b"x" + text.replace("\r", "").encode() for text in texts]
    stream = b"".join(b"data: " + each + newline * 2 for each in data)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = EventSplitter()
    events = [
        event for first, last in pairwise(edges) for event in splitter.push(stream[first:last])
    ]

    assert [data_of(event) for event in events] == data


def test_comments_and_names_are_no_data() -> None:
    assert data_of(b": ping") == b""
    assert data_of(b"event: message_stop\ndata: {}") == b"{}"


@pytest.mark.parametrize(
    ("endpoint", "content", "delta"),
    [
        (CHAT, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Delta()),
        (CHAT, {"choices": [{"delta": {"content": "a"}}]}, Delta(text="a", num_tokens=1)),
        # A token whose text is not complete.
        (CHAT, {"choices": [{"delta": {"content": ""}}]}, Delta(num_tokens=1)),
        (CHAT, {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, Delta(num_tokens=1)),
        (
            CHAT,
            {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
            Delta(finish_reason=FinishReason.STOP),
        ),
        (
            TEXT,
            {"choices": [{"text": "ab", "token_ids": [1, 2], "finish_reason": "length"}]},
            Delta(text="ab", num_tokens=2, token_ids=(1, 2), finish_reason=FinishReason.LENGTH),
        ),
        (
            TEXT,
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
            Delta(lengths=Lengths(5, 2, 4), only_usage=True),
        ),
        (RESPONSES, {"type": "response.created", "response": {"status": "in_progress"}}, Delta()),
        (
            RESPONSES,
            {"type": "response.output_text.delta", "delta": "a"},
            Delta(text="a", num_tokens=1),
        ),
        (RESPONSES, {"type": "response.reasoning_text.delta", "delta": "a"}, Delta(num_tokens=1)),
        (
            RESPONSES,
            {
                "type": "response.incomplete",
                "response": {"status": "incomplete", "usage": {"input_tokens": 3}},
            },
            Delta(finish_reason=FinishReason.LENGTH, lengths=Lengths(3)),
        ),
        (
            MESSAGES,
            {"type": "message_start", "message": {"usage": {"input_tokens": 7}}},
            Delta(lengths=Lengths(7)),
        ),
        (
            MESSAGES,
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
            Delta(text="a", num_tokens=1),
        ),
        (
            MESSAGES,
            {
                "type": "message_delta",
                "delta": {"stop_reason": "max_tokens"},
                "usage": {"output_tokens": 9},
            },
            Delta(finish_reason=FinishReason.LENGTH, lengths=Lengths(completion=9)),
        ),
        (MESSAGES, {"type": "ping"}, Delta()),
    ],
)
def test_events_are_read_by_their_endpoint(endpoint: str, content: Any, delta: Delta) -> None:
    assert read(endpoint, encoded(content)) == delta


@pytest.mark.parametrize(
    ("endpoint", "content"),
    [
        (CHAT, {"error": {"message": "out of memory"}}),
        (RESPONSES, {"type": "response.failed", "response": {}, "error": {"message": "no"}}),
        (MESSAGES, {"type": "error", "error": {"message": "no"}}),
        (MESSAGES, {"error": {"message": "no", "type": "server_error", "code": 500}}),
        ("/v1/embeddings", {"error": {"message": "no"}}),
    ],
)
def test_event_of_an_error_ends_the_answer(endpoint: str, content: Any) -> None:
    with pytest.raises(ContractError, match="server failed") as failed:
        read(endpoint, encoded(content))

    assert failed.value.status == 502


def test_answer_without_json_is_an_error_of_the_server() -> None:
    with pytest.raises(ContractError, match="cannot be read") as failed:
        read(CHAT, b"<html>")

    assert failed.value.status == 502


def test_refusals_keep_message_field_and_status() -> None:
    body = encoded({"error": {"message": "n is too large", "param": "n", "code": 400}})
    error = refusal(422, body)

    assert isinstance(error, ContractError)
    assert (str(error), error.param, error.status) == ("n is too large", "n", 422)


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_leaves_the_request_to_others(status: int) -> None:
    assert isinstance(refusal(status, b"busy"), NotActiveError)


def test_chat_events_add_up_to_the_response() -> None:
    def chunk(delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": None} | fields
        return encoded({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})

    first = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": ""}}
    response = json.loads(
        response_of(
            CHAT,
            [
                chunk({"role": "assistant", "content": ""}),
                chunk({"content": "a"}, logprobs={"content": [1]}),
                chunk({"content": "b", "reasoning": "r"}, logprobs={"content": [2]}),
                chunk({"tool_calls": [first]}),
                chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
                chunk({}, finish_reason="tool_calls"),
                encoded({"id": "c", "choices": [], "usage": {"prompt_tokens": 1}}),
            ],
        )
    )

    (choice,) = response["choices"]
    assert response["object"] == "chat.completion"
    assert response["usage"] == {"prompt_tokens": 1}
    assert choice["finish_reason"] == "tool_calls"
    assert choice["logprobs"] == {"content": [1, 2]}
    assert choice["message"] == {
        "role": "assistant",
        "content": "ab",
        "reasoning": "r",
        "tool_calls": [
            {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }


def test_text_events_of_two_answers_add_up_to_the_response() -> None:
    events = [
        encoded({"object": "text_completion", "choices": [{"index": index, "text": text}]})
        for index, text in ((1, "c"), (0, "a"), (1, "d"), (0, "b"))
    ]
    response = json.loads(response_of(TEXT, events))

    assert [choice["text"] for choice in response["choices"]] == ["ab", "cd"]
    assert response["object"] == "text_completion"


def test_message_events_add_up_to_the_response() -> None:
    def delta(index: int, **fields: Any) -> bytes:
        return encoded({"type": "content_block_delta", "index": index, "delta": fields})

    def start(index: int, **fields: Any) -> bytes:
        return encoded({"type": "content_block_start", "index": index, "content_block": fields})

    response = json.loads(
        response_of(
            MESSAGES,
            [
                encoded({"type": "message_start", "message": {"id": "m", "content": []}}),
                start(0, type="text", text=""),
                delta(0, text="a"),
                delta(0, text="b"),
                start(1, type="tool_use", name="f", input={}),
                delta(1, partial_json='{"x":'),
                delta(1, partial_json="1}"),
                encoded({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
                encoded({"type": "message_stop"}),
            ],
        )
    )

    assert response["content"] == [
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
    ]
    assert response["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("text", "value"), [('{"x":', {}), ("3E9999", None), ("", {})])
def test_input_of_a_tool_call_may_be_cut_or_huge(text: str, value: Any) -> None:
    events = [
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use"}},
        {"type": "content_block_delta", "index": 0, "delta": {"partial_json": text}},
    ]
    response = json.loads(response_of(MESSAGES, map(encoded, events)))

    assert response["content"][0]["input"] == value


def test_last_event_of_responses_has_the_response() -> None:
    events = [
        encoded({"type": "response.created", "response": {"status": "in_progress"}}),
        encoded({"type": "response.completed", "response": {"status": "completed"}}),
    ]

    assert json.loads(response_of(RESPONSES, events)) == {"status": "completed"}
