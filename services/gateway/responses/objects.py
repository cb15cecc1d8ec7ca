"""The response object and its events, as clients of stored responses see them."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import msgspec

from services.gateway.parameters import whole_number
from services.gateway.responses.asked import conversation, input_items
from shared.contracts.errors import ContractError
from shared.contracts.requests import ErrorInfo
from shared.store.objects.responses import Ending, StoredEvent, StoredResponse
from shared.store.objects.webhooks import Notice
from solver.storage.response_events import (
    COMPLETED,
    CREATED,
    ENDS,
    LIFECYCLE,
    QUEUED,
    Event,
    end_type,
    folded,
)

_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a body that the object repeats -> default, until the front fills them in."""
MAX_LIMIT, DEFAULT_LIMIT = 100, 20


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the input of a response."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


def queued_object(response: StoredResponse, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a new response."""
    echoed = {name: asked.get(name) or default for name, default in _ECHOED.items()}
    shown: dict[str, Any] = {
        "model": response.model,
        "output": [],
        "status": "queued",
        "usage": None,
    }
    return shown_object(response, echoed | shown)


def shown_object(response: StoredResponse, made: Mapping[str, Any]) -> dict[str, Any]:
    """The object that the front made, as one of the store."""
    return {"error": None, "incomplete_details": None, **made} | {
        "id": response.id,
        "object": "response",
        "created_at": int(response.created_at),
        "background": response.is_background,
        "previous_response_id": response.previous_response_id,
        "store": True,
    }


def first_events(queued: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a response that waits."""
    return [
        {"type": kind, "sequence_number": number, "response": queued}
        for number, kind in enumerate((CREATED, QUEUED))
    ]


def shown_event(response: StoredResponse, event: Event) -> dict[str, Any]:
    """An event of the front as one of the store; `sequence_number` is set later."""
    if event["type"] not in LIFECYCLE:
        return dict(event)
    made = shown_object(response, event["response"])
    kind = event["type"]
    if kind == COMPLETED and made.get("status") == "incomplete":
        kind = end_type("incomplete")  # vLLM calls every end `completed`
    if kind in ENDS:
        made["status"] = kind.removeprefix("response.")
    if "headway" in event:
        made["headway"] = event["headway"]
    return {**event, "type": kind, "response": made}


def stored_event(event: Event) -> StoredEvent:
    """*event* as a row."""
    return StoredEvent(
        number=event["sequence_number"], type=event["type"], data=msgspec.json.encode(event)
    )


def decoded(events: Iterable[StoredEvent]) -> list[dict[str, Any]]:
    """Rows as events."""
    return [msgspec.json.decode(event.data) for event in events]


def ending_of(
    response: StoredResponse,
    events: Sequence[StoredEvent],
    *,
    error: ErrorInfo | None,
    notice: Notice | None,
) -> Ending:
    """
    The end of a response that is cancelled, or fails with *error*; its output is what there is.
    """
    status = "cancelled" if error is None else "failed"
    made = shown_object(response, folded(decoded(events))) | {"status": status}
    made["output"] = [_unfinished(item) for item in made.get("output") or []]
    if error is not None:
        made["error"] = {"code": error.code, "message": error.message}
    kind, number = end_type(status), response.num_events
    event = {"type": kind, "sequence_number": number, "response": made}
    return Ending(
        status=status, object=msgspec.json.encode(made), event=stored_event(event), notice=notice
    )


def _unfinished(item: Any) -> Any:
    if isinstance(item, dict) and item.get("status") == "in_progress":
        return item | {"status": "incomplete"}
    return item


def sse(events: Iterable[StoredEvent]) -> bytes:
    """Events as parts of a stream."""
    return b"".join(
        b"event: " + event.type.encode() + b"\ndata: " + event.data + b"\n\n" for event in events
    )


def input_page(
    response: StoredResponse, turns: Sequence[StoredResponse], query: Mapping[str, str]
) -> InputItems:
    """
    A page of the input of *response*, with that of the turns before it.

    Raises:
        ContractError: A parameter is invalid; `param` is its name.
    """
    own = msgspec.json.decode(response.asked)["input"]
    every = [*conversation(turns), *input_items(own)]
    items = [_item_object(response.id, number, item) for number, item in enumerate(every)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ContractError("order must be asc or desc", param="order")
    limit = whole_number("limit", query.get("limit", str(DEFAULT_LIMIT)), low=1, high=MAX_LIMIT)
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [number for number, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ContractError("after must be the id of an input item", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return InputItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(ordered) > limit,
    )


def _item_object(response_id: str, number: int, item: Any) -> dict[str, Any]:
    """An input item with an id, and the content of a message as parts."""
    made = dict(item) if isinstance(item, dict) else {"content": item}
    if "role" in made:
        made.setdefault("type", "message")
        made.setdefault("status", "completed")
        if isinstance(made.get("content"), str):
            kind = "output_text" if made["role"] == "assistant" else "input_text"
            made["content"] = [{"type": kind, "text": made["content"]}]
    digest = sha256(f"{response_id} {number}".encode()).hexdigest()[:32]
    return {"id": f"msg_{digest}", **made}


def parse_starting_after(query: Mapping[str, str]) -> int:
    """
    Number of the event after which a stream begins; -1 for all events.

    Raises:
        ContractError: It is not a number, or the request does not ask for a stream.
    """
    text = query.get("starting_after")
    if text is None:
        return -1
    if not parse_stream(query):
        raise ContractError("starting_after needs stream=true", param="starting_after")
    return whole_number("starting_after", text, low=-1, high=2**53)


def parse_stream(query: Mapping[str, str]) -> bool:
    """
    The parameter `stream`.

    Raises:
        ContractError: It is neither true nor false.
    """
    text = query.get("stream", "false").lower()
    if text not in ("true", "false"):
        raise ContractError("stream must be true or false", param="stream")
    return text == "true"
