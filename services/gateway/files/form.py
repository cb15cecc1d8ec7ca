"""A form with a file, read as it arrives: no part of the file is kept."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from shared.contracts.base import Seconds
from shared.contracts.errors import ContractError

FILE_FIELD = "file"
MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
DISCARD_BYTES, DISCARD_S = 64 * 2**20, 10.0


@dataclass(frozen=True, slots=True)
class Field:
    """A complete field of the form."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileBegin:
    """The begin of the form's file; its parts follow as bytes."""

    filename: str


FormEvent = Field | FileBegin | bytes


class RequestBody:
    """
    The body of an HTTP request as it arrives.

    Args:
        receive: The `receive` of ASGI.
        idle_s: Longest time between two parts.
    """

    def __init__(self, receive: Any, *, idle_s: Seconds) -> None:
        self._receive = receive
        self._idle_s = idle_s
        self._ended = False

    async def read(self) -> bytes | None:
        """
        The next part of the body, which may be empty; None at the end.

        Raises:
            ContractError: The client sends nothing for too long, or disconnects.
        """
        if self._ended:
            return None
        try:
            async with asyncio.timeout(self._idle_s):
                event = await self._receive()
        except TimeoutError:
            raise ContractError(
                f"the body did not arrive in time: nothing was sent for {self._idle_s:g} s",
                code="body_timeout",
                status=408,
            ) from None
        if event["type"] == "http.disconnect":
            self._ended = True
            raise ContractError("the client disconnected", code="cancelled", status=499)
        self._ended = not event.get("more_body", False)
        return bytes(event.get("body", b""))

    async def whole(self, limit: int) -> bytes:
        """
        The whole body, of at most *limit* bytes.

        Raises:
            ContractError: It is larger, or as for `read`.
        """
        parts, size = [], 0
        while (part := await self.read()) is not None:
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ContractError(
                    f"the body is too large: the limit is {limit} bytes",
                    code="body_too_large",
                    status=413,
                )
        return b"".join(parts)

    async def discard(self) -> None:
        """
        Read what the client still sends, within limits.

        A client that is refused in the middle of its body may otherwise lose the answer, since the
        connection is reset when it sends more.
        """
        size = 0
        try:
            async with asyncio.timeout(DISCARD_S):
                while size <= DISCARD_BYTES and (part := await self.read()) is not None:
                    size += len(part)
        except (TimeoutError, ContractError):
            return


def form_boundary(content_type: str | None) -> str:
    """
    Boundary of the parts of a form.

    Raises:
        ContractError: The body has another content type, or no boundary.
    """
    kind, options = parse_options_header(content_type or "")
    boundary = options.get("boundary")
    if kind != "multipart/form-data" or not boundary:
        raise ContractError(
            "the body must be a form: content-type multipart/form-data with a boundary",
            param="content-type",
        )
    return str(boundary)


async def form_events(body: RequestBody, boundary: str) -> AsyncGenerator[FormEvent, None]:
    """
    Fields of a form and the parts of its one file, in the order of arrival.

    Raises:
        ContractError: The form is malformed or too large, or has no or several files.
    """
    form = _Form()
    try:
        with PushMultipartParser(boundary, max_segment_count=MAX_FIELDS) as parser:
            while (part := await body.read()) is not None:
                # What follows the end of the form is ignored.
                for event in () if parser.closed or not part else parser.parse(part):
                    if (found := form.read(event)) is not None:
                        yield found
    except MultipartError as error:
        raise ContractError(f"the form is malformed: {error}") from error
    if not form.num_files:
        raise ContractError("the form has no file", param=FILE_FIELD)


class _Form:
    """Reads the parser's events: the begin of a part, its bytes, and None at its end."""

    def __init__(self) -> None:
        self.num_files = 0
        self._name = ""
        self._value = bytearray()

    def read(self, event: MultipartSegment | bytes | None) -> FormEvent | None:
        """What *event* completes; None if more is needed."""
        if isinstance(event, MultipartSegment):
            return self._begin(event)
        if event is None:
            return None if self._name == FILE_FIELD else Field(self._name, self._text())
        if self._name == FILE_FIELD:
            return bytes(event)
        self._value += event
        if len(self._value) > MAX_FIELD_BYTES:
            raise ContractError(
                f"the field is longer than {MAX_FIELD_BYTES} bytes", param=self._name
            )
        return None

    def _begin(self, segment: MultipartSegment) -> FileBegin | None:
        self._name, self._value = segment.name or "", bytearray()
        if self._name != FILE_FIELD:
            return None
        self.num_files += 1
        if self.num_files > 1:
            raise ContractError("only one file per upload", param=FILE_FIELD)
        return FileBegin(segment.filename or FILE_FIELD)

    def _text(self) -> str:
        try:
            return self._value.decode()
        except UnicodeDecodeError:
            raise ContractError("the field is not UTF-8", param=self._name) from None
