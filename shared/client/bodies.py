"""Bodies of requests, made of the fields that a program gives."""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from shared.contracts.base import Value, hinted
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest, InferenceRequest, RequestedTargets
from shared.contracts.requests import ReplyMode


class _Streamed(Value, frozen=True, kw_only=True):
    """Field of the body of a call from which the reply mode follows."""

    stream: bool = False


def body_of(fields: Mapping[str, Any]) -> InferenceRequest | CallRequest:
    """
    The body of a message with *fields*: a call if there is an `endpoint`.

    Raises:
        ContractError: A field is unknown, missing or has a wrong value; the message names it.
    """
    body_type: type[InferenceRequest | CallRequest] = (
        CallRequest if "endpoint" in fields else InferenceRequest
    )
    known = [field.encode_name for field in msgspec.structs.fields(body_type)]
    for name in fields:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ContractError(f"a request has no field {name!r}{hint}", param=name)
    try:
        _refuse_not_finite(fields)
        encoded = msgspec.json.encode(fields)
        msgspec.json.decode(encoded, type=RequestedTargets)
        body = msgspec.json.decode(encoded, type=body_type)
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise ContractError(f"invalid request: {hinted(str(error))}") from error
    if isinstance(body, InferenceRequest) and body.prompt is None and body.messages is None:
        raise ContractError("a request needs a prompt or messages", param="prompt")
    return body


def _refuse_not_finite(value: Any, path: str = "") -> None:
    """
    Refuse numbers that JSON lacks: they would be sent as null, as if the field were missing.

    Raises:
        ContractError: There is one; `param` is its path.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ContractError(f"{path} is {value}; it must be a finite number", param=path)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        for name, part in value.items():
            _refuse_not_finite(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and not (value and isinstance(value[0], int)):
        for number, part in enumerate(value):
            _refuse_not_finite(part, f"{path}[{number}]")


def reply_mode(body: InferenceRequest | CallRequest) -> ReplyMode:
    """
    Replies that *body* asks for. By default, an answer is streamed, and that of a call if the
    call's body asks for a stream.

    Raises:
        ContractError: The body of the call is not an object.
    """
    if body.reply is not None:
        return body.reply
    if isinstance(body, InferenceRequest):
        return ReplyMode.STREAM
    try:
        streamed = msgspec.json.decode(body.body, type=_Streamed).stream
    except msgspec.ValidationError as error:
        raise ContractError(f"invalid body: {error}", param="body") from error
    return ReplyMode.STREAM if streamed else ReplyMode.FINAL
