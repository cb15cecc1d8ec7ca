"""A form with a file, read as it arrives: no part of the file is kept."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from services.gateway.body import RequestBody
from shared.contracts.errors import ContractError

FILE_FIELD = "file"
MAX_FORM_BYTES = 64 * 1024
"""Bytes of a form beside those of its file, with all headers and boundaries."""
MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
MAX_HEADERS = 8
"""Number of headers of one part."""
MAX_HEADER_BYTES = 4096


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
    limits = {"max_header_count": MAX_HEADERS, "max_header_size": MAX_HEADER_BYTES}
    try:
        with PushMultipartParser(boundary, **limits) as parser:
            while (part := await body.read()) is not None:
                form.num_bytes += len(part)
                # What follows the end of the form is ignored.
                for event in () if parser.closed or not part else parser.parse(part):
                    if (found := form.read(event)) is not None:
                        yield found
                form.check_size()
    except ParserLimitReached as error:
        raise ContractError(
            f"a part of the form has more than {MAX_HEADERS} headers, or a header of more than "
            f"{MAX_HEADER_BYTES} bytes"
        ) from error
    except MultipartError as error:
        raise ContractError(f"the form is malformed: {error}") from error
    if not form.num_files:
        raise ContractError("the form has no file", param=FILE_FIELD)


class _Form:
    """Reads the parser's events: the begin of a part, its bytes, and None at its end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes that have arrived, without those of the file."""
        self.num_files = 0
        self._num_parts = 0
        self._name = ""
        self._value = bytearray()

    def read(self, event: MultipartSegment | bytes | None) -> FormEvent | None:
        """What *event* completes; None if more is needed."""
        if isinstance(event, MultipartSegment):
            return self._begin(event)
        if event is None:
            return None if self._name == FILE_FIELD else Field(self._name, self._text())
        if self._name == FILE_FIELD:
            self.num_bytes -= len(event)
            return bytes(event)
        self._value += event
        if len(self._value) > MAX_FIELD_BYTES:
            raise ContractError(
                f"the field is longer than {MAX_FIELD_BYTES} bytes", param=self._name
            )
        return None

    def check_size(self) -> None:
        """
        Check the size of the form without its file.

        Raises:
            ContractError: It is too large (status 413).
        """
        if self.num_bytes > MAX_FORM_BYTES:
            raise ContractError(
                f"the form is too large: the limit is {MAX_FORM_BYTES} bytes beside the file",
                code="body_too_large",
                status=413,
            )

    def _begin(self, segment: MultipartSegment) -> FileBegin | None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ContractError(f"the form has more than {MAX_PARTS} parts")
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
