"""Responses and their events for tests, as vLLM's application makes them."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

Event = dict[str, Any]


def message(*texts: str) -> Event:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "status": "completed", "content": parts}


def reasoning(text: str) -> Event:
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "status": "completed", "content": parts}


def function_call(name: str, arguments: str) -> Event:
    return {
        "type": "function_call",
        "name": name,
        "status": "completed",
        "call_id": "",
        "arguments": arguments,
    }


class Rendering:
    """
    One rendering of an answer: ids of its own, and texts that are cut in its own way.

    Args:
        items: The answer.
        name: Part of the ids.
        cut: Cuts a text into pieces.
        status: Status of the response at its end.
    """

    def __init__(
        self,
        items: Sequence[Event],
        *,
        name: str,
        cut: Callable[[str], list[str]] = list,
        status: str = "completed",
    ) -> None:
        self._cut = cut
        self._items = [
            item
            | {"id": f"item_{name}_{number}"}
            | ({"call_id": f"call_{name}_{number}"} if "call_id" in item else {})
            for number, item in enumerate(items)
        ]
        begun = {"id": f"resp_{name}", "object": "response", "model": "m", "output": []}
        begun |= {"status": "in_progress", "usage": None}
        self.response = begun | {
            "status": status,
            "output": self._items,
            "usage": {"output_tokens": 7},
        }
        events: list[Event] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(self._items):
            events += self._of_item(item, index)
        # As vLLM, which calls every end so.
        events.append({"type": "response.completed", "response": self.response})
        self.events = [
            event | {"sequence_number": number} for number, event in zip(count(), events)
        ]

    def _of_item(self, item: Event, index: int) -> list[Event]:
        place = {"output_index": index, "item_id": item["id"]}
        empty = item | {"status": "in_progress"}
        if "content" in item:
            empty["content"] = []
            inner = [
                event
                for number, part in enumerate(item["content"])
                for event in self._of_part(part, place | {"content_index": number})
            ]
        else:
            empty["arguments"] = ""
            kind = "response.function_call_arguments"
            inner = [
                *self._deltas(f"{kind}.delta", item["arguments"], place),
                {"type": f"{kind}.done", **place, "arguments": item["arguments"]},
            ]
        return [
            {"type": "response.output_item.added", "output_index": index, "item": empty},
            *inner,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def _of_part(self, part: Event, place: Event) -> list[Event]:
        kind, text = part["type"], part["text"]
        return [
            {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
            *self._deltas(f"response.{kind}.delta", text, place),
            {"type": f"response.{kind}.done", **place, "text": text},
            {"type": "response.content_part.done", **place, "part": part},
        ]

    def _deltas(self, kind: str, text: str, place: Event) -> list[Event]:
        return [{"type": kind, **place, "delta": piece} for piece in self._cut(text)]


def text_of(events: Sequence[Event]) -> str:
    """The text of all deltas of messages."""
    return "".join(
        event["delta"] for event in events if event["type"] == "response.output_text.delta"
    )
