"""Lines of the input file of a batch: where they are, and what they ask."""

from array import array
from codecs import BOM_UTF8
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import msgspec

from shared.api.calls import CallFields, call_fields
from shared.contracts.errors import ContractError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Endpoints of batches, those of OpenAI's Batch API."""
MAX_CUSTOM_ID_CHARS = 512
FRAME_BYTES = 64 * 1024
"""Bytes of a line beside its body, at most."""


class _Line(msgspec.Struct, frozen=True):
    """A line as it is written; all fields are checked one by one, for precise errors."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Named(msgspec.Struct, frozen=True):
    custom_id: Any = None


_line, _named = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Named)
"""Made here, since threads decode lines (`shared.api.calls`)."""


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A valid line."""

    custom_id: str
    body: bytes
    """The body for the endpoint, as it is written."""


CheckBody = Callable[[CallFields], None]
"""Raises `ContractError` if the mesh cannot serve a body with these fields."""


def parse_line(raw: bytes, *, endpoint: str, check: CheckBody) -> BatchLine:
    """
    The request in a line of the input.

    Args:
        raw: The line.
        endpoint: Endpoint of the batch.
        check: Checks the body.

    Raises:
        ContractError: The line is invalid; the message names the field.
    """
    try:
        line = _line.decode(raw.removeprefix(BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(
            f"the line is not a JSON object: {error}", code="invalid_json"
        ) from error
    custom_id = line.custom_id
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise ContractError(
            f"custom_id must be text of 1 to {MAX_CUSTOM_ID_CHARS} characters", param="custom_id"
        )
    if line.method != "POST":
        raise ContractError("method must be POST", param="method")
    if line.url != endpoint:
        raise ContractError(f"url must be {endpoint}, the endpoint of the batch", param="url")
    if not bytes(line.body).startswith(b"{"):
        raise ContractError("body must be an object", param="body")
    body = bytes(line.body)
    check(call_fields(body))
    return BatchLine(custom_id=custom_id, body=body)


def custom_id_of(raw: bytes) -> str | None:
    """The `custom_id` of a line that may be invalid; None if it has none."""
    try:
        found = _named.decode(raw.removeprefix(BOM_UTF8)).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


class LineState(IntEnum):
    """How far a line is."""

    TO_DO = 0
    """It was not published, or has to be published again."""
    OUTSTANDING = 1
    COMPLETED = 2
    FAILED = 3
    INVALID = 4


class LineTable:
    """Place and state of each line; about 13 bytes for a line."""

    def __init__(self) -> None:
        self.starts = array("Q")
        self.lengths = array("I")
        self.states = bytearray()

    def __len__(self) -> int:
        return len(self.states)

    def add(self, start: int, length: int, state: LineState) -> None:
        """Append a line, whose begin and length are in bytes."""
        self.starts.append(start)
        self.lengths.append(length)
        self.states.append(state)

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Bytes of the file with the lines from *first* up to *end*, at least one."""
        return self.starts[first], self.starts[end - 1] + self.lengths[end - 1]

    def end_of(self, first: int, *, max_lines: int, max_bytes: int) -> int:
        """End of a run of lines from *first* within the limits; at least one line."""
        limit = min(len(self), first + max_lines)
        begin, end = self.starts[first], first + 1
        while end < limit and self.starts[end] + self.lengths[end] - begin <= max_bytes:
            end += 1
        return end

    def count(self, state: LineState) -> int:
        """Number of lines in *state*."""
        return self.states.count(state)

    @property
    def num_left(self) -> int:
        """Number of lines that have not ended."""
        return self.count(LineState.TO_DO) + self.count(LineState.OUTSTANDING)


class InvalidInputError(ContractError):
    """The input as a whole cannot be read as a file of requests."""


class Scanner:
    """
    Finds and checks the lines of an input file, which is fed in blocks. Holds one line at a time,
    and eight bytes for each `custom_id`.

    Args:
        endpoint: Endpoint of the batch.
        check: Checks bodies.
        max_lines: Maximum number of lines.
        max_body_bytes: Maximum size of a body; longer lines are invalid.
    """

    def __init__(
        self, *, endpoint: str, check: CheckBody, max_lines: int, max_body_bytes: int
    ) -> None:
        self.table = LineTable()
        self._endpoint = endpoint
        self._check = check
        self._max_lines = max_lines
        self._max_line_bytes = max_body_bytes + FRAME_BYTES
        self._custom_ids: set[int] = set()
        self._num_json = 0
        self._rest = bytearray()
        self._start = 0
        """Offset of the line that `_rest` begins."""
        self._num_dropped = 0
        """Bytes of that line that were dropped, since it is too long."""

    def feed(self, block: bytes) -> None:
        """
        Read a block.

        Raises:
            InvalidInputError: There are too many lines.
        """
        lines = block.split(b"\n")
        for line in lines[:-1]:
            self._append(line)
            self._end_line(terminator=1)
        self._append(lines[-1])

    def end(self) -> LineTable:
        """
        Read the last line; return all lines.

        Raises:
            InvalidInputError: There are too many lines or none, or none is JSON.
        """
        self._end_line(terminator=0)
        if not len(self.table):
            raise InvalidInputError("the input file has no lines", code="empty_file")
        if not self._num_json:
            raise InvalidInputError(
                "no line of the input file is a JSON object: it must be a file of JSON lines",
                code="invalid_json_line",
            )
        return self.table

    def _append(self, part: bytes) -> None:
        if self._num_dropped or len(self._rest) + len(part) > self._max_line_bytes:
            self._num_dropped += len(self._rest) + len(part)
            self._rest.clear()
        else:
            self._rest += part

    def _end_line(self, *, terminator: int) -> None:
        length = len(self._rest) + self._num_dropped
        line, self._rest = bytes(self._rest), bytearray()
        is_dropped, self._num_dropped = bool(self._num_dropped), 0
        start, self._start = self._start, self._start + length + terminator
        if not is_dropped and not line.strip():
            return
        if len(self.table) >= self._max_lines:
            raise InvalidInputError(
                f"the input file has more than {self._max_lines} lines (batches.max_lines)",
                code="too_many_lines",
            )
        is_valid = not is_dropped and self._is_valid(line)
        self.table.add(start, length, LineState.TO_DO if is_valid else LineState.INVALID)

    def _is_valid(self, line: bytes) -> bool:
        try:
            parsed = parse_line(line, endpoint=self._endpoint, check=self._check)
        except ContractError as error:
            self._num_json += error.code != "invalid_json"
            return False
        self._num_json += 1
        return self.is_new(parsed.custom_id)

    def is_new(self, custom_id: str) -> bool:
        """Return whether no line before had this `custom_id`."""
        digest = int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest())
        if digest in self._custom_ids:
            return False
        self._custom_ids.add(digest)
        return True
