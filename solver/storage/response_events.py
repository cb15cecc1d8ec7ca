"""The events of a response in OpenAI's Responses API, and the response that they make."""

from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
"""An event as it is sent: `type`, `sequence_number` and the fields of the type."""

CREATED, QUEUED, IN_PROGRESS = "response.created", "response.queued", "response.in_progress"
COMPLETED, INCOMPLETE = "response.completed", "response.incomplete"
FAILED, CANCELLED = "response.failed", "response.cancelled"
ENDS = frozenset({COMPLETED, INCOMPLETE, FAILED, CANCELLED})
"""Types of the last event of a response."""
LIFECYCLE = ENDS | {CREATED, QUEUED, IN_PROGRESS}
"""Types of events that have the response object."""
ITEM_ADDED, ITEM_DONE = "response.output_item.added", "response.output_item.done"
PART_ADDED, PART_DONE = "response.content_part.added", "response.content_part.done"
DELTA = ".delta"
"""End of the types whose `delta` is the next piece of a text."""
TEXT_FIELDS: Mapping[str, str] = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "text",
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}
"""Type of a delta -> field of the part, or of the item without parts, that it extends."""


def end_type(status: str) -> str:
    """Type of the last event of a response that ends with *status*."""
    return f"response.{status}"


def folded(events: Iterable[Event]) -> dict[str, Any]:
    """
    The response object after *events*, which begin with `response.created`.

    The last event of a response has the whole object. Before that, the output is made of the items,
    parts and deltas so far.
    """
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind = event["type"]
        if kind in LIFECYCLE:
            response = dict(event["response"])
        elif kind in (ITEM_ADDED, ITEM_DONE):
            items[event["output_index"]] = _copied(event["item"])
        elif (item := items.get(event.get("output_index", -1))) is not None:
            _apply(item, event)
        if kind in ENDS:
            return response
    return response | {"output": [items[index] for index in sorted(items)]}


def _copied(item: Mapping[str, Any]) -> dict[str, Any]:
    parts = item.get("content")
    copied = {**item}
    if isinstance(parts, list):
        copied["content"] = [{**part} for part in parts]
    return copied


def _apply(item: dict[str, Any], event: Event) -> None:
    """Add a part, or a piece of text, to *item*."""
    kind, index = event["type"], event.get("content_index")
    if kind in (PART_ADDED, PART_DONE):
        parts = _parts_until(item, event["content_index"])
        parts[event["content_index"]] = {**event["part"]}
    elif (field := TEXT_FIELDS.get(kind)) is not None:
        target = item
        if index is not None:
            target = _parts_until(item, index)[index]
        target[field] = (target.get(field) or "") + event["delta"]


def _parts_until(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """The parts of *item*, of which at least *index* + 1 exist."""
    parts: list[dict[str, Any]] = item.get("content") or []
    parts += [{} for _ in range(index + 1 - len(parts))]
    item["content"] = parts
    return parts
