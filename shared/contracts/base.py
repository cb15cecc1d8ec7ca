"""Base of all messages, id types, and the codec."""

import re
from codecs import BOM_UTF8
from difflib import get_close_matches
from typing import Annotated, Any, Generic, NewType, TypeVar

import msgspec

from shared.contracts.errors import ContractError

RequestId = NewType("RequestId", str)
RunId = NewType("RunId", str)
InstanceId = NewType("InstanceId", str)
TenantId = NewType("TenantId", str)
ModelName = NewType("ModelName", str)
"""Name of a base model, the unit of residency on an engine."""

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]

Seconds = float
UnixTime = float

T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a message. The decoder ignores unknown fields."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """
    Message of the mesh, tagged `<noun>.<verb>.v<N>`.

    New versions only add fields with defaults; a change of meaning needs a new tag.
    """


_encoder = msgspec.json.Encoder()


SLO_FIELDS = ("ttft_s", "tbt_s", "ttlt_s", "deadline_at")
"""Fields of `slo`, the only object of requests whose unknown fields are refused."""
_MISSPELT = re.compile(r"unknown field `(.*)` - at `\$(?:\.\w+)*\.slo`$")


def hinted(text: str) -> str:
    """Msgspec's text about a body that violates its schema, with the fields that `slo` has."""
    if (misspelt := _MISSPELT.search(text)) is None:
        return text
    near = get_close_matches(misspelt[1], SLO_FIELDS, n=1)
    asked = f"; did you mean `{near[0]}`?" if near else ""
    return f"{text}: slo has the fields {', '.join(SLO_FIELDS)}{asked}"


def encode(message: msgspec.Struct) -> bytes:
    """Encode *message* as JSON; equal messages give equal bytes."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes messages of one type, or of a union of types, from JSON bytes."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.json.Decoder(message_type)

    def __call__(self, body: bytes) -> T:
        """
        Decode the message in *body*.

        Raises:
            ContractError: The body is not JSON or breaks the schema; the message names the field.
        """
        try:
            return self._decoder.decode(body.removeprefix(BOM_UTF8))  # type: ignore[no-any-return]
        except msgspec.ValidationError as error:
            raise ContractError(f"message breaks its schema: {hinted(str(error))}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ContractError(f"message is not valid JSON: {error}") from error
        except RecursionError as error:
            raise ContractError("message is nested too deeply") from error


def tag_of(message_type: type[Message]) -> str:
    """Value of `kind` with which *message_type* is sent."""
    return str(message_type.__struct_config__.tag)
