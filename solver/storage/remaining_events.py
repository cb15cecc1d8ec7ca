"""
Continues the events of a response with those of another stream of the same answer.

When the gateway that ran a response is gone, another gateway requests the answer again. It gets the
same answer, rendered again: texts are cut at other places, and items have other ids.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.contracts.errors import MeshError
from solver.storage.response_events import DELTA, ENDS, ITEM_ADDED, LIFECYCLE, Event

_IDS = ("id", "item_id", "call_id")
"""Fields with ids that differ in each rendering of an answer."""
_PLACE = ("output_index", "content_index", "summary_index")
"""Fields with the place in the output to which an event belongs."""
_Key = tuple[Any, ...]


class StreamDivergedError(MeshError):
    """The other stream contradicts events that were already sent; the response cannot continue."""

    code = "run_diverged"


class Continuation:
    """
    Finds the events that are missing, one event of the other stream after another.

    Text is compared by its place in the output and by its length: a piece that was sent is left
    out, and a piece that was sent in part is cut. Other events are sent once for each place. Items
    keep the ids with which they were sent first.

    Args:
        sent: The events that were sent, from the first one.
    """

    def __init__(self, sent: Iterable[Event]) -> None:
        self._texts: dict[_Key, str] = {}
        self._events = Counter[_Key]()
        self._items: dict[int, Mapping[str, Any]] = {}
        self._num_events = 0
        self._has_ended = False
        self._seen: dict[_Key, int] = {}
        self._seen_events = Counter[_Key]()
        self._ids: dict[str, str] = {}
        for event in sent:
            self._remember(event)

    def next(self, event: Event) -> dict[str, Any] | None:
        """
        The event to send for the next *event* of the other stream; None if it was sent before.

        Raises:
            StreamDivergedError: *event* contradicts what was sent.
        """
        if self._has_ended:
            return None
        if event["type"] == ITEM_ADDED:
            self._match_item(event)
        if event["type"] in ENDS:
            self._check_texts()
        renamed: dict[str, Any] = _renamed(event, self._ids) if self._ids else dict(event)
        missing = self._cut(renamed) if _is_delta(event) else self._once(renamed)
        if missing is None:
            return None
        missing["sequence_number"] = self._num_events
        self._remember(missing)
        return missing

    def _once(self, event: dict[str, Any]) -> dict[str, Any] | None:
        key = _key(event)
        self._seen_events[key] += 1
        return None if self._seen_events[key] <= self._events[key] else event

    def _cut(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The part of a piece of text that was not sent."""
        key, piece = _key(event), event["delta"]
        sent, start = self._texts.get(key, ""), self._seen.get(key, 0)
        self._seen[key] = start + len(piece)
        overlap = sent[start : start + len(piece)]
        if not piece.startswith(overlap):
            raise StreamDivergedError(f"the answer contradicts the text at {_place(event)}")
        if len(overlap) == len(piece) and start < len(sent):
            return None
        if not overlap:
            return event
        cut = event | {"delta": piece[len(overlap) :]}
        if event.get("logprobs"):
            cut["logprobs"] = _logprobs_after(event["logprobs"], len(overlap))
        return cut

    def _match_item(self, event: Event) -> None:
        """Record the ids with which the item was sent."""
        sent, item = self._items.get(event["output_index"]), event["item"]
        if sent is None:
            return
        if sent.get("type") != item.get("type") or sent.get("name") != item.get("name"):
            raise StreamDivergedError(f"the answer has another item at {_place(event)}")
        for field in _IDS:
            if isinstance(item.get(field), str) and isinstance(sent.get(field), str):
                self._ids[item[field]] = sent[field]

    def _check_texts(self) -> None:
        for key, text in self._texts.items():
            if self._seen.get(key, 0) < len(text):
                raise StreamDivergedError(f"the answer lacks text that was sent: {key[0]}")

    def _remember(self, event: Event) -> None:
        self._num_events += 1
        self._has_ended = event["type"] in ENDS
        key = _key(event)
        if _is_delta(event):
            self._texts[key] = self._texts.get(key, "") + event["delta"]
        else:
            self._events[key] += 1
        if event["type"] == ITEM_ADDED:
            self._items[event["output_index"]] = event["item"]


def events_of(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a *response* that a server answers as a whole."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response.get("output") or []):
        events += _events_of_item(item, index)
    events.append({"type": f"response.{response.get('status')}", "response": dict(response)})
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def _events_of_item(item: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    empty = {**item, "status": "in_progress"} | {
        field: [] if field == "content" else ""
        for field in ("content", "arguments", "input")
        if item.get(field)
    }
    place = {"output_index": index, "item_id": item.get("id")}
    events: list[dict[str, Any]] = [
        {"type": ITEM_ADDED, "output_index": index, "item": empty},
    ]
    for number, part in enumerate(item.get("content") or []):
        events += _events_of_part(part, place | {"content_index": number})
    for field, kind in (
        ("arguments", "response.function_call_arguments"),
        ("input", "response.custom_tool_call_input"),
    ):
        if isinstance(item.get(field), str) and item[field]:
            events.append({"type": f"{kind}.delta", **place, "delta": item[field]})
            events.append({"type": f"{kind}.done", **place, field: item[field]})
    return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]


def _events_of_part(part: Mapping[str, Any], place: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = str(part.get("type"))
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field) or ""
    deltas: list[dict[str, Any]] = []
    if text:
        extra = {"logprobs": part.get("logprobs") or []} if kind == "output_text" else {}
        deltas = [
            {"type": f"response.{kind}.delta", **place, "delta": text, **extra},
            {"type": f"response.{kind}.done", **place, field: text, **extra},
        ]
    return [
        {"type": "response.content_part.added", **place, "part": {**part, field: ""}},
        *deltas,
        {"type": "response.content_part.done", **place, "part": dict(part)},
    ]


def _is_delta(event: Event) -> bool:
    return str(event["type"]).endswith(DELTA) and isinstance(event.get("delta"), str)


def _key(event: Event) -> _Key:
    if event["type"] in LIFECYCLE:
        return (event["type"],)
    return (event["type"], *(event.get(field) for field in _PLACE))


def _place(event: Event) -> str:
    return ", ".join(f"{field} {event[field]}" for field in _PLACE if event.get(field) is not None)


def _renamed(value: Any, ids: Mapping[str, str], field: str = "") -> Any:
    """A copy of *value* in which ids of items are those that were sent."""
    if isinstance(value, Mapping):
        return {name: _renamed(each, ids, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, ids) for each in value]
    return ids.get(value, value) if field in _IDS and isinstance(value, str) else value


def _logprobs_after(logprobs: Sequence[Mapping[str, Any]], length: int) -> list[Any]:
    """Log-probabilities of the tokens that begin at *length* or after it."""
    start, kept = 0, []
    for each in logprobs:
        if start >= length:
            kept.append(each)
        start += len(each.get("token", ""))
    return kept
