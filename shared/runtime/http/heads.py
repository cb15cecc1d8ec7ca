"""Limits on the heads of HTTP requests, which hold before any application or key is known."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shared.contracts.base import Seconds

MOST_HEAD_BYTES = 64 * 1024
MOST_HEADERS = 200
HEAD_S: Seconds = 10.0
"""Time for a head, from the connection or from the head's first byte."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Answer to a head that is not taken."""

    status: int
    code: str
    message: str


_MANY_BYTES = _Refusal(
    status=431,
    code="headers_too_large",
    message=f"the limit is {MOST_HEAD_BYTES} bytes for the address and the headers of a request",
)
_MANY_HEADERS = _Refusal(
    status=431,
    code="too_many_headers",
    message=f"the limit is {MOST_HEADERS} headers a request",
)
_LATE = _Refusal(
    status=408,
    code="headers_timeout",
    message=f"the headers of a request must arrive within {HEAD_S:g} s",
)


class BoundedHeads(HttpToolsProtocol):
    """
    One connection of a server. A head that is too large or too slow is refused, and the connection
    is closed; one on which nothing arrives is closed without an answer.

    Args:
        origins: Origins whose pages may read refusals; `*`: all. Other origins than `*` are named
            if the header `Origin` came before the refusal.
    """

    def __init__(self, *args: Any, origins: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._origins = origins
        self._has_head = False
        """True between the end of a head and the begin of the next."""
        self._num_headers = self._num_bytes = 0
        """Numbers of the present head, as far as it is complete."""
        self._num_unparsed = 0
        """Bytes of the present head that arrived after the packet in which it began."""
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: _Refusal | None = None
        """Refusal of the present head, which ends its parsing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, self._on_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        is_continued = not self._has_head
        super().data_received(data)
        if self._has_head or not is_continued:
            self._num_unparsed = 0
            return
        self._num_unparsed += len(data)
        if self._num_unparsed > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._answer(_MANY_BYTES)

    def on_message_begin(self) -> None:
        self._num_headers = self._num_bytes = 0
        if self._has_head:
            self._has_head = False
            self._timer = self.loop.call_later(HEAD_S, self._on_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            self._refuse(_MANY_HEADERS)
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._refusal is not None:
            self._answer(self._refusal)
        else:
            super().send_400_response(msg)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MOST_HEAD_BYTES:
            self._refuse(_MANY_BYTES)

    def _refuse(self, refusal: _Refusal) -> None:
        """End the parsing of the present head; `send_400_response` follows."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def _on_late(self) -> None:
        is_empty = not (self._num_unparsed or self._num_bytes)
        if self.transport.is_closing():
            return
        if is_empty:
            self.transport.close()
        else:
            self._answer(_LATE)

    def _answer(self, refusal: _Refusal) -> None:
        """Answer with an error in OpenAI's format, and close the connection."""
        self._stop_timer()
        error = {"message": refusal.message, "type": "invalid_request_error", "param": None}
        body = msgspec.json.encode({"error": {**error, "code": refusal.code}})
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            % len(body)
        )
        self.transport.write(STATUS_LINE[refusal.status] + head + self._cors() + b"\r\n" + body)
        self.transport.close()

    def _cors(self) -> bytes:
        """Header lines with which browsers let pages of an allowed origin read the answer."""
        if "*" in self._origins:
            return b"access-control-allow-origin: *\r\n"
        origin = next((value for name, value in self.headers or () if name == b"origin"), b"")
        if origin.decode("latin-1") not in self._origins:
            return b""
        return b"access-control-allow-origin: %b\r\nvary: Origin\r\n" % origin

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
