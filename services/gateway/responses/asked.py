"""What a client asks of stored responses, and the body that the front gets for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from shared.api.calls import call_fields
from shared.contracts.base import hinted
from shared.contracts.errors import ContractError
from shared.store.objects.responses import StoredResponse

STORE_FIELDS = ("background", "store", "previous_response_id")
"""Fields that stored responses serve; the front does not get them."""
_FALSE_VALUES = (b"null", b"false")
PREVIOUS = "previous_response_id"


class AskedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a body that decide how the response is stored and answered."""

    model: str
    input: str | list[Any]
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None

    @property
    def is_background(self) -> bool:
        return bool(self.background)

    @property
    def is_stored(self) -> bool:
        """
        True if the client names a field that needs it, and does not refuse it: OpenAI's default
        would keep prompts of clients that do not know of a store.
        """
        return self.store is not False


def names_the_store(body: bytes) -> bool:
    """True if *body* asks for something that only stored responses can do."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the front refuses it
    return any(bytes(fields.get(name, b"null")) not in _FALSE_VALUES for name in STORE_FIELDS)


def parse_asked(body: bytes) -> AskedResponse:
    """
    The fields of *body*.

    Raises:
        ContractError: The body is not a JSON object, or a field is invalid; `param` names it.
    """
    fields = call_fields(body)
    known = {name: fields[name] for name in AskedResponse.__struct_fields__ if name in fields}
    try:
        asked = msgspec.json.decode(msgspec.json.encode(known), type=AskedResponse)
    except msgspec.ValidationError as error:
        text = str(error)
        missing = "model" if "`model`" in text else "input"
        param = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else missing
        raise ContractError(hinted(text), param=param) from error
    if asked.is_background and asked.store is False:
        raise ContractError("background needs the store: store must not be false", param="store")
    return asked


def input_items(asked_input: str | Sequence[Any]) -> list[Any]:
    """The input of one turn as a list of items."""
    if isinstance(asked_input, str):
        return [{"type": "message", "role": "user", "content": asked_input}]
    return list(asked_input)


def conversation(turns: Sequence[StoredResponse]) -> list[Any]:
    """
    Input and output items of earlier turns, in order.

    Args:
        turns: The turns, the oldest first.
    """
    items: list[Any] = []
    for turn in turns:
        items += input_items(msgspec.json.decode(turn.asked, type=_Input).input)
        output = msgspec.json.decode(turn.object, type=_Output).output
        items += [_without_nulls(item) for item in output]
    return items


def front_body(
    body: bytes, turns: Sequence[StoredResponse], *, stream: bool | None = True
) -> bytes:
    """
    The body for the front: without the fields of the store, and with earlier turns as input.

    Equal arguments give equal bytes on every gateway, since the mesh compares digests of bodies.

    Args:
        body: The body that the client sent.
        turns: Earlier turns of the conversation, the oldest first.
        stream: Value of the field `stream`; None: as the client sent it.
    """
    fields = {
        name: value
        for name, value in msgspec.json.decode(body, type=dict[str, Raw]).items()
        if name not in STORE_FIELDS
    }
    if stream is not None:
        fields["stream"] = Raw(msgspec.json.encode(stream))
    if turns:
        own = input_items(msgspec.json.decode(body, type=_Input).input)
        fields["input"] = Raw(msgspec.json.encode([*conversation(turns), *own]))
    return msgspec.json.encode(fields)


def check_turns(turns: Sequence[StoredResponse], previous_id: str) -> None:
    """
    Check that a new response can continue *previous_id*, the last one of *turns*.

    Raises:
        ContractError: A turn is missing, or the last one has no answer.
    """
    missing = turns[0].previous_response_id if turns else previous_id
    if missing is not None:
        raise ContractError(
            f"previous response {missing[:64]} not found",
            code="previous_response_not_found",
            param=PREVIOUS,
        )
    last = turns[-1]
    if last.status not in ("completed", "incomplete"):
        raise ContractError(
            f"previous response {last.id} has no answer: its status is {last.status}",
            code="previous_response_not_usable",
            param=PREVIOUS,
        )


class _Input(msgspec.Struct, frozen=True):
    input: str | list[Any] = []


class _Output(msgspec.Struct, frozen=True):
    output: list[Any] = []


def _without_nulls(value: Any) -> Any:
    """*value* without fields that are null, which servers accept in answers but not in inputs."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value
