"""Server-sent events of streamed answers, and the responses that they add up to."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

Json = dict[str, Any]
_WHOLE = {"chat.completion.chunk": "chat.completion"}
"""`object` of events -> that of the response."""
DONE = b"[DONE]"
"""Data of the last event of OpenAI's older streams."""


class EventSplitter:
    """Divides the bytes of a stream into events, which remain as the server sent them."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """Append *data* to the stream; return the events that are complete now."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event for event in events if event.strip()]

    @property
    def rest(self) -> bytes:
        """The begin of an event that is not complete yet."""
        return self._rest


def data_of(event: bytes) -> bytes:
    """Data of an event; empty if it has none, e.g. because it keeps the connection alive."""
    lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


def response_of(endpoint: str, events: Iterable[bytes]) -> bytes:
    """
    The response of an endpoint, made of the data of its stream's events.

    Args:
        endpoint: One of `shared.api.calls.ENDPOINTS`.
        events: Data of the events, in order, without `[DONE]`.
    """
    decoded = [json.loads(data) for data in events]  # reads numbers of any size
    return msgspec.json.encode(_MAKERS[endpoint](decoded))


def response_of_stream(endpoint: str, stream: bytes) -> bytes:
    """The response of an endpoint, made of its whole stream."""
    data = [data_of(event) for event in stream.split(b"\n\n")]
    return response_of(endpoint, [each for each in data if each not in (b"", DONE)])


def _of_chunks(chunks: list[Json]) -> Json:
    """Response of `/v1/chat/completions` or `/v1/completions`."""
    response: Json = {}
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            _add_choice(choices.setdefault(choice.get("index", 0), {}), choice)
        response |= {name: value for name, value in chunk.items() if name != "choices"}
    response["object"] = _WHOLE.get(response.get("object", ""), response.get("object"))
    response["choices"] = [choices[index] for index in sorted(choices)]
    return response


def _add_choice(known: Json, choice: Json) -> None:
    for name, value in choice.items():
        if name == "delta":
            _add_message(known.setdefault("message", {"role": "assistant"}), value)
        elif name == "text":
            known["text"] = known.get("text", "") + (value or "")
        elif name == "logprobs" and value and known.get("logprobs"):
            for key, items in value.items():
                known["logprobs"][key] = (known["logprobs"].get(key) or []) + (items or [])
        elif name == "token_ids" and value:
            known[name] = (known.get(name) or []) + value
        elif value is not None or name not in known:
            known[name] = value


def _add_message(known: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = known.setdefault("tool_calls", [])
            for part in value or ():
                _add_tool_call(calls, part)
        elif isinstance(value, str) and name != "role":
            known[name] = (known.get(name) or "") + value
        elif value is not None or name not in known:
            known[name] = value


def _add_tool_call(calls: list[Json], part: Json) -> None:
    index = part.get("index", len(calls))
    while len(calls) <= index:
        calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    function = part.get("function") or {}
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""
    call |= {name: value for name, value in part.items() if name not in ("function", "index")}


def _of_responses(events: list[Json]) -> Json:
    """Response of `/v1/responses`, which the last event has."""
    found = [event["response"] for event in events if isinstance(event.get("response"), dict)]
    return found[-1] if found else {}


def _of_messages(events: list[Json]) -> Json:
    """Response of `/v1/messages`."""
    response: Json = {}
    blocks: dict[int, Json] = {}
    inputs: dict[int, str] = {}
    for event in events:
        index = event.get("index", 0)
        match event.get("type"):
            case "message_start":
                response = dict(event["message"])
            case "content_block_start":
                blocks[index] = dict(event["content_block"])
            case "content_block_delta":
                _add_to_block(blocks.setdefault(index, {}), inputs, index, event["delta"])
            case "message_delta":
                usage = (response.get("usage") or {}) | (event.get("usage") or {})
                response |= event["delta"] | {"usage": usage}
    for index, text in inputs.items():
        blocks[index]["input"] = _input_of(text)
    response["content"] = [blocks[index] for index in sorted(blocks)]
    return response


def _input_of(text: str) -> Any:
    """Input of a tool call; empty if the answer ended before it was complete."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _add_to_block(block: Json, inputs: dict[int, str], index: int, delta: Json) -> None:
    for name in ("text", "thinking", "signature"):
        if name in delta:
            block[name] = (block.get(name) or "") + delta[name]
    if "partial_json" in delta:
        inputs[index] = inputs.get(index, "") + delta["partial_json"]


_MAKERS: Mapping[str, Callable[[list[Json]], Json]] = {
    "/v1/chat/completions": _of_chunks,
    "/v1/completions": _of_chunks,
    "/v1/responses": _of_responses,
    "/v1/messages": _of_messages,
}
