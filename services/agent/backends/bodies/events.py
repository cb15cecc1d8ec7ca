"""Events of streamed answers in the forms of the four endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from services.agent.backends.bodies.asked import CHAT, MESSAGES, RESPONSES
from services.agent.backends.bodies.tools import Tool, escaped
from shared.api.calls import COMPLETIONS
from shared.contracts.requests import FinishReason

DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Numbers of tokens of a call."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What all events of an answer have in common."""

    request_id: str
    model: str
    created_at: int
    """Unix seconds."""
    tool: Tool | None
    includes_usage: bool


class Events(Protocol):
    """
    Makes the events of a call's answers, each a server-sent event with its end.

    The events are a function of the answers, so that a later run makes the same.
    """

    def begin(self, index: int) -> bytes:
        """Events before the first text of an answer."""
        ...

    def text(self, index: int, text: str) -> bytes:
        """Event with the next text of an answer, which is not empty."""
        ...

    def end(self, index: int, reason: FinishReason) -> bytes:
        """Events at the end of an answer."""
        ...

    def close(self, usage: Usage) -> bytes:
        """Events after all answers."""
        ...


def _event(data: Json) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _named(data: Json) -> bytes:
    return f"event: {data['type']}\n".encode() + _event(data)


class ChatEvents:
    """Events of `/v1/chat/completions`."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    def begin(self, index: int) -> bytes:
        events = self._delta(index, {"role": "assistant", "content": ""})
        if (tool := self._heading.tool) is None:
            return events
        call = {
            "index": 0,
            "id": f"call_{self._heading.request_id}_{index}",
            "type": "function",
            "function": {"name": tool.name, "arguments": tool.frame[0]},
        }
        return events + self._delta(index, {"tool_calls": [call]})

    def text(self, index: int, text: str) -> bytes:
        tool = self._heading.tool
        if tool is None:
            return self._delta(index, {"content": text})
        return self._arguments(index, escaped(text)) if tool.frame[1] else b""

    def end(self, index: int, reason: FinishReason) -> bytes:
        tool = self._heading.tool
        if tool is None:
            return self._delta(index, {}, _OPENAI_REASONS[reason])
        rest = self._arguments(index, tool.frame[1]) if tool.frame[1] else b""
        return rest + self._delta(index, {}, "tool_calls")

    def close(self, usage: Usage) -> bytes:
        return _usage_event(self._chunk([]), self._heading, usage) + DONE

    def _arguments(self, index: int, text: str) -> bytes:
        return self._delta(index, {"tool_calls": [{"index": 0, "function": {"arguments": text}}]})

    def _delta(self, index: int, delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event(self._chunk([choice]))

    def _chunk(self, choices: list[Json]) -> Json:
        return _chunk(self._heading, "chatcmpl-", "chat.completion.chunk", choices)


class CompletionEvents:
    """Events of `/v1/completions`."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    def begin(self, index: int) -> bytes:  # noqa: ARG002 - this form has no such event
        return b""

    def text(self, index: int, text: str) -> bytes:
        return self._choice(index, text, None)

    def end(self, index: int, reason: FinishReason) -> bytes:
        return self._choice(index, "", _OPENAI_REASONS[reason])

    def close(self, usage: Usage) -> bytes:
        return _usage_event(self._chunk([]), self._heading, usage) + DONE

    def _choice(self, index: int, text: str, reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return _event(self._chunk([choice]))

    def _chunk(self, choices: list[Json]) -> Json:
        return _chunk(self._heading, "cmpl-", "text_completion", choices)


class ResponseEvents:
    """Events of `/v1/responses`, which has one answer."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._number = -1
        self._text = ""
        self._reason = FinishReason.STOP

    def begin(self, index: int) -> bytes:  # noqa: ARG002 - there is one answer
        opened = self._response("in_progress", [])
        events = self._numbered({"type": "response.created", "response": opened})
        events += self._numbered({"type": "response.in_progress", "response": opened})
        item = self._item("in_progress")
        events += self._numbered(
            {"type": "response.output_item.added", "output_index": 0, "item": item}
        )
        if self._heading.tool is None:
            return events + self._of_part("response.content_part.added", part=_output_text(""))
        return events + self._arguments(self._heading.tool.frame[0])

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002 - there is one answer
        tool = self._heading.tool
        if tool is not None:
            return self._arguments(escaped(text)) if tool.frame[1] else b""
        self._text += text
        return self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, index: int, reason: FinishReason) -> bytes:  # noqa: ARG002 - there is one answer
        tool, self._reason = self._heading.tool, reason
        if tool is None:
            events = self._of_part("response.output_text.done", text=self._text, logprobs=[])
            events += self._of_part("response.content_part.done", part=_output_text(self._text))
        else:
            events = self._arguments(tool.frame[1]) if tool.frame[1] else b""
            events += self._numbered(
                {
                    "type": "response.function_call_arguments.done",
                    "item_id": self._item_id,
                    "name": tool.name,
                    "output_index": 0,
                    "arguments": self._text,
                }
            )
        return events + self._numbered(
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": self._item(self._status),
            }
        )

    def close(self, usage: Usage) -> bytes:
        whole = self._response(self._status, [self._item(self._status)]) | {
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            }
        }
        return self._numbered({"type": f"response.{self._status}", "response": whole})

    @property
    def _status(self) -> str:
        is_cut = self._reason is FinishReason.LENGTH and self._heading.tool is None
        return "incomplete" if is_cut else "completed"

    @property
    def _item_id(self) -> str:
        kind = "msg" if self._heading.tool is None else "fc"
        return f"{kind}_{self._heading.request_id}"

    def _item(self, status: str) -> Json:
        tool, item = self._heading.tool, {"id": self._item_id, "status": status}
        is_open = status == "in_progress"
        if tool is None:
            content = [] if is_open else [_output_text(self._text)]
            return item | {"type": "message", "role": "assistant", "content": content}
        return item | {
            "type": "function_call",
            "call_id": f"call_{self._heading.request_id}",
            "name": tool.name,
            "arguments": "" if is_open else self._text,
        }

    def _response(self, status: str, output: list[Json]) -> Json:
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{self._heading.request_id}",
            "object": "response",
            "created_at": self._heading.created_at,
            "model": self._heading.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": False,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }

    def _arguments(self, text: str) -> bytes:
        self._text += text
        return self._numbered(
            {
                "type": "response.function_call_arguments.delta",
                "item_id": self._item_id,
                "output_index": 0,
                "delta": text,
            }
        )

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._numbered({"type": kind, **place, **fields})

    def _numbered(self, data: Json) -> bytes:
        self._number += 1
        return _named({**data, "sequence_number": self._number})


class MessageEvents:
    """Events of `/v1/messages`, which has one answer."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._reason = FinishReason.STOP

    def begin(self, index: int) -> bytes:  # noqa: ARG002 - there is one answer
        message: Json = {
            "id": f"msg_{self._heading.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        tool = self._heading.tool
        block: Json = {"type": "text", "text": ""}
        if tool is not None:
            name = {"id": f"toolu_{self._heading.request_id}", "name": tool.name}
            block = {"type": "tool_use", **name, "input": {}}
        events = _named({"type": "message_start", "message": message})
        events += _named({"type": "content_block_start", "index": 0, "content_block": block})
        return events if tool is None else events + self._arguments(tool.frame[0])

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002 - there is one answer
        tool = self._heading.tool
        if tool is None:
            return self._delta({"type": "text_delta", "text": text})
        return self._arguments(escaped(text)) if tool.frame[1] else b""

    def end(self, index: int, reason: FinishReason) -> bytes:  # noqa: ARG002 - there is one answer
        tool, self._reason = self._heading.tool, reason
        rest = self._arguments(tool.frame[1]) if tool is not None and tool.frame[1] else b""
        return rest + _named({"type": "content_block_stop", "index": 0})

    def close(self, usage: Usage) -> bytes:
        tool, is_cut = self._heading.tool, self._reason is FinishReason.LENGTH
        reason = "tool_use" if tool is not None else "max_tokens" if is_cut else "end_turn"
        tokens = {
            "input_tokens": usage.prompt,
            "output_tokens": usage.completion,
            "cache_read_input_tokens": usage.cached,
        }
        delta = {"stop_reason": reason, "stop_sequence": None}
        events = _named({"type": "message_delta", "delta": delta, "usage": tokens})
        return events + _named({"type": "message_stop"})

    def _arguments(self, text: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _delta(self, delta: Json) -> bytes:
        return _named({"type": "content_block_delta", "index": 0, "delta": delta})


_EVENTS: Mapping[str, type[ChatEvents | CompletionEvents | ResponseEvents | MessageEvents]] = {
    CHAT: ChatEvents,
    COMPLETIONS: CompletionEvents,
    RESPONSES: ResponseEvents,
    MESSAGES: MessageEvents,
}
_OPENAI_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "stop",
}


def events_for(endpoint: str, heading: Heading) -> Events:
    """The events of one call to *endpoint*."""
    return _EVENTS[endpoint](heading)


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _chunk(heading: Heading, prefix: str, kind: str, choices: list[Json]) -> Json:
    return {
        "id": prefix + heading.request_id,
        "object": kind,
        "created": heading.created_at,
        "model": heading.model,
        "choices": choices,
        "system_fingerprint": None,
        **({"usage": None} if heading.includes_usage else {}),
    }


def _usage_event(chunk: Json, heading: Heading, usage: Usage) -> bytes:
    """Event with the numbers of tokens; empty if the client has not asked for it."""
    if not heading.includes_usage:
        return b""
    tokens = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    return _event({**chunk, "usage": tokens})
