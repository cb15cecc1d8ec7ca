"""Lines of the output and error files of a batch, in OpenAI's form."""

from enum import Enum
from http import HTTPStatus

import msgspec

from services.gateway.errors import error_body
from shared.contracts.base import RequestId, UnixTime
from shared.contracts.ends import DEADLINE_EXPIRED
from shared.contracts.requests import ErrorInfo, RequestFailed
from shared.producer.assembly import CANCELLED

RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of refusals for load: a line that was refused with them is published again later."""


_LINE_BREAKS = ("\x85", "\u2028", "\u2029")
"""
Characters that end a line in Python's `str.splitlines`; JSON strings may have them as they are.
They are escaped, so that clients that split the text of a file by lines get whole lines.
"""


class Unfinished(Enum):
    """Why a line has no response; the value is the code of its error."""

    EXPIRED = "batch_expired"
    CANCELLED = "batch_cancelled"


_MESSAGES = {
    Unfinished.EXPIRED: "This request could not be executed before the completion window expired.",
    Unfinished.CANCELLED: "The batch was cancelled before this request was executed.",
}


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a line that has no response."""

    code: str
    message: str
    param: str | None = None


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output or the error file; one of `response` and `error` is null."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None


def answered(request_id: RequestId, custom_id: str | None, body: bytes) -> bytes:
    """The line of a request that was answered."""
    return _encoded(request_id, custom_id, status=200, body=body)


def refused(request_id: RequestId, custom_id: str | None, error: ErrorInfo) -> bytes:
    """The line of a request that the mesh or a server refused, with the response of HTTP."""
    own = bytes(error.response or b"")
    return _encoded(request_id, custom_id, status=error.status, body=own or error_body(error))


def without_response(request_id: RequestId, custom_id: str | None, error: LineError) -> bytes:
    """The line of a request that was not run."""
    return _line(ResultLine(id=_id(request_id), custom_id=custom_id, error=error))


def unfinished(reason: Unfinished) -> LineError:
    """Error of a line that had not ended when its batch did."""
    return LineError(code=reason.value, message=_MESSAGES[reason])


def is_retried(failed: RequestFailed) -> bool:
    """Return whether a line was refused for load, and can be published again."""
    return failed.error.status in RETRIED


def has_expired(failed: RequestFailed, expires_at: UnixTime) -> bool:
    """Return whether a line ended with the window of its batch, not with an end of its own."""
    return failed.error.code == DEADLINE_EXPIRED and failed.at >= expires_at - WINDOW_SLACK_S


WINDOW_SLACK_S = 1.0
"""Clocks of hosts may differ by this time."""


def was_cancelled(failed: RequestFailed) -> bool:
    """Return whether a line was cancelled."""
    return failed.error.code == CANCELLED.code


def _encoded(request_id: RequestId, custom_id: str | None, *, status: int, body: bytes) -> bytes:
    response = LineResponse(status_code=status, request_id=request_id, body=_one_line(body))
    return _line(ResultLine(id=_id(request_id), custom_id=custom_id, response=response))


def _one_line(body: bytes) -> msgspec.Raw:
    """The JSON of a response without line breaks; text as JSON if a server answered other text."""
    try:
        return msgspec.Raw(msgspec.json.format(body, indent=-1) if b"\n" in body else body)
    except msgspec.DecodeError:
        return msgspec.Raw(msgspec.json.encode(body.decode(errors="replace")))


def _id(request_id: RequestId) -> str:
    return f"batch_req_{request_id.removeprefix('batch_')}"


def _line(line: ResultLine) -> bytes:
    encoded = msgspec.json.encode(line)
    for character in _LINE_BREAKS:
        encoded = encoded.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return encoded + b"\n"
