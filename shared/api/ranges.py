"""
Ranges of the fields of bodies, so that most invalid bodies are refused before they wait.

They are those of vLLM's application, which reads all that pass here: a value that it would accept,
e.g. a number in a string, is not refused. The fields of errors are its own also.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.api.calls import COMPLETIONS, ENDPOINTS, RESPONSES, CallFields
from shared.contracts.errors import ContractError

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_MOST_ANSWERS = 16384
"""vLLM's limit of `n`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Values of a number."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """True if `low` itself is too low."""
    whole: bool = False
    """True if the number has no fraction."""
    param: str | None = None
    """Field that the error names: vLLM's, which names only some."""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'greater than' if self.above else 'at least'} {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


_LIMIT = Range(low=1, whole=True, param="max_tokens")
_SAMPLING: Mapping[str, Range] = {
    "temperature": Range(low=0, param="temperature"),
    "top_p": Range(low=0, high=1, above=True, param="top_p"),
    "top_k": Range(low=-1, whole=True),
}
_GENERATION: Mapping[str, Range] = {
    **_SAMPLING,
    "min_p": Range(low=0, high=1),
    "presence_penalty": Range(low=-2, high=2),
    "frequency_penalty": Range(low=-2, high=2),
    "repetition_penalty": Range(low=0, above=True),
    "max_tokens": _LIMIT,
    "min_tokens": Range(low=0, whole=True),
    "n": Range(low=1, high=_MOST_ANSWERS, whole=True),
    "seed": Range(whole=True),
}
RANGES: Mapping[str, Mapping[str, Range]] = {
    CHAT: {**_GENERATION, "max_completion_tokens": _LIMIT},
    COMPLETIONS: _GENERATION,
    RESPONSES: {**_SAMPLING, "max_output_tokens": _LIMIT},
    MESSAGES: _SAMPLING,
}
"""
Endpoint -> field -> its range. The limit of a message is left to vLLM, whose error names the field
in a form that Anthropic's errors do not have.
"""
_NEEDED = {CHAT: "messages", RESPONSES: "input"}
"""Endpoint -> field without which no body is valid."""
_NULL = msgspec.Raw(b"null")
_SHORT = 64
"""Longest field, in bytes, that may be an empty list."""
_MOST = 1e300
"""Largest number that is compared; larger integers have no floating-point form."""


def check_ranges(endpoint: str, fields: CallFields) -> None:
    """
    Check the fields of a body that are cheap to check.

    Raises:
        ContractError: A field is missing, has the wrong type or is out of its range; the message
            names it.
    """
    if endpoint not in ENDPOINTS:
        return
    needed = _NEEDED.get(endpoint)
    if needed is not None and bytes(fields.get(needed, _NULL)) == b"null":
        raise _refused(f"{needed} is missing", f"body.{needed}")
    _check_prompt(endpoint, fields)
    numbers = {
        name: _number(name, limits, fields[name])
        for name, limits in RANGES[endpoint].items()
        if name in fields
    }
    for name, number in numbers.items():
        limits = RANGES[endpoint][name]
        is_unread = name == "max_tokens" and "max_completion_tokens" in fields
        is_echo = name == "max_tokens" and number == 0 and "echo" in fields
        if number is not None and number not in limits and not (is_unread or is_echo):
            raise _refused(f"{name} must be {limits}, got {number:g}", limits.param)
    if endpoint in (CHAT, COMPLETIONS):
        _check_together(fields, numbers)


def _check_prompt(endpoint: str, fields: CallFields) -> None:
    if endpoint == COMPLETIONS:
        if bytes(fields.get("prompt", _NULL)) in (b"null", b'""'):
            raise _refused("prompt is missing or empty", "prompt")
        return
    messages = bytes(fields.get("messages", _NULL))
    if endpoint == CHAT and messages[:1] != b"[":
        raise _refused("messages must be a list", "body.messages")
    if len(messages) <= _SHORT and _decoded(fields.get("messages", _NULL)) == []:
        raise _refused("messages is empty: send at least one message", None)


def _check_together(fields: CallFields, numbers: Mapping[str, float | None]) -> None:
    """Check fields that depend on others."""
    least, most = numbers.get("min_tokens"), numbers.get("max_tokens")
    is_limit = "max_completion_tokens" not in fields  # which vLLM prefers
    if is_limit and least is not None and most is not None and least > most:
        raise _refused(f"min_tokens must be at most max_tokens={most:g}, got {least:g}", None)
    streams = bytes(fields.get("stream", _NULL)) not in (b"null", b"false")
    if _value(fields, "stream_options") and not streams:
        raise _refused("stream_options need stream=true", "stream_options")
    if _value(fields, "allowed_token_ids") == []:
        raise _refused("allowed_token_ids is empty", "allowed_token_ids")
    if _value(fields, "stop") in ("", [""]):
        raise _refused("stop must not be an empty string", None)
    if _value(fields, "tool_choice") == "required" and not _value(fields, "tools"):
        raise _refused("tool_choice needs tools", "tool_choice")


def _value(fields: CallFields, name: str) -> Any:
    return _decoded(fields[name]) if name in fields else None


def _decoded(raw: msgspec.Raw) -> Any:
    """The value of a field; None if only vLLM may know what it means, e.g. of half a character."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _number(name: str, limits: Range, raw: msgspec.Raw) -> float | None:
    """
    Value of a field, as pydantic reads it; None if it has none, or one that this does not check.

    Raises:
        ContractError: It is not a number, or has a fraction and may have none.
    """
    value = _decoded(raw)
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = _number_in(value)
    if not isinstance(value, int | float):
        raise _refused(f"{name} must be a number", f"body.{name}")
    if limits.whole and isinstance(value, float) and math.isfinite(value) and value % 1:
        raise _refused(f"{name} must be a whole number, got {value:g}", f"body.{name}")
    return value if abs(value) <= _MOST else None


def _number_in(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _refused(message: str, param: str | None) -> ContractError:
    return ContractError(message, param=param)
