"""The answer to one request on its way to the client; an event stream is kept alive."""

import asyncio
from collections.abc import Mapping
from typing import Any

from services.gateway.edge.forms import ApiForm
from services.gateway.errors import error_headers
from services.gateway.headers import MESH_REQUEST_ID
from shared.contracts.base import Seconds
from shared.contracts.requests import ErrorInfo

OK = 200
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Headers of an event stream that the edge begins; proxies must not buffer events."""


class Answer:
    """
    Passes the ASGI events of an application to the client, and sends a comment after each interval
    without a byte of an event stream.

    If the answer was announced as an event stream and has not begun after the first interval, the
    status line is sent then. An error of the application becomes the last event of such a stream.

    Args:
        send: The `send` of ASGI.
        announced: Headers of the event stream; empty until the application has announced one.
        form: Form of comments and errors in the API of the request.
        interval_s: Longest time without a byte; 0: no limit.
    """

    def __init__(
        self, send: Any, announced: Mapping[str, str], form: ApiForm, interval_s: Seconds
    ) -> None:
        self._send = send
        self._announced = announced
        self._form = form
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._is_stream = False
        """True once the status line of an event stream was sent."""
        self._is_begun = False
        """True once a status line was sent."""
        self._is_early = False
        """True if the edge has sent it, so that the application's is not passed."""
        self._is_ended = False
        self._between_events = True
        """True if the last byte was that of a complete event."""
        self._whole: list[bytes] | None = None
        """Parts of an error, where the edge has begun a stream."""
        self._beat: asyncio.Task[None] | None = None
        """Task that sends a comment."""
        self._timer: asyncio.TimerHandle | None = None
        if interval_s:
            self._timer = self._loop.call_later(interval_s, self._due)

    async def send(self, event: dict[str, Any]) -> None:
        """Process one ASGI event of the application."""
        if self._beat is not None:
            await asyncio.wait({self._beat})
        if event["type"] == "http.response.start":
            await self._start(event)
        elif event["type"] == "http.response.body":
            await self._body(event)
        else:
            await self._send(event)

    async def fail(self, info: ErrorInfo) -> None:
        """
        End the answer with an error: as a response, as the last event of a stream, or by a missing
        rest if another answer has begun.
        """
        if self._beat is not None:
            await asyncio.wait({self._beat})
        if self._is_ended or (self._is_begun and not self._is_stream):
            return
        if self._is_begun:
            rest = b"" if self._between_events else b"\n\n"
            await self._last(rest + self._form.event(info, self._id))
            return
        self._is_begun = True
        body = self._form.error_body(info)
        headers = {"content-type": JSON, "content-length": str(len(body))} | error_headers(info)
        await self._send(_start(info.status, headers | _ids(self._announced)))
        await self._last(body)

    def close(self) -> None:
        """Send no further comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    @property
    def _id(self) -> str | None:
        return self._announced.get(MESH_REQUEST_ID)

    async def _start(self, event: dict[str, Any]) -> None:
        is_stream = event["status"] == OK and _is_stream(event)
        if self._is_early:
            self._whole = None if is_stream else []
            return
        self._is_begun, self._is_stream = True, is_stream
        self._sent_at = self._loop.time()
        await self._send(event)

    async def _body(self, event: dict[str, Any]) -> None:
        body, more = event.get("body", b""), event.get("more_body", False)
        if self._whole is not None:
            self._whole.append(body)
            if not more:
                await self._last(self._form.error_event(b"".join(self._whole), self._id))
            return
        self._is_ended = not more
        if body:
            self._sent_at = self._loop.time()
            self._between_events = body.endswith(b"\n\n")
        await self._send(event)

    async def _last(self, body: bytes) -> None:
        self._is_ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _due(self) -> None:
        """Send a comment if the interval has passed; look again after the rest of it."""
        left_s = self._sent_at + self._interval_s - self._loop.time()
        may_send = self._is_stream if self._is_begun else bool(self._announced)
        if left_s <= 0.0:
            left_s = self._interval_s
            if may_send and self._between_events and not self._is_ended and self._beat is None:
                self._beat = self._loop.create_task(self._send_comment(), name="keep alive")
        self._timer = self._loop.call_later(left_s, self._due)

    async def _send_comment(self) -> None:
        try:
            if not self._is_begun:
                self._is_begun = self._is_stream = self._is_early = True
                await self._send(_start(OK, dict(self._announced) | STREAM_HEADERS))
            self._sent_at = self._loop.time()
            comment = self._form.comment
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})
        finally:
            self._beat = None


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _ids(announced: Mapping[str, str]) -> dict[str, str]:
    """Those of the announced headers that also belong to an error."""
    return {name: value for name, value in announced.items() if name.endswith("request-id")}


def _is_stream(start: dict[str, Any]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(EVENT_STREAM.encode())
        for name, value in start.get("headers", ())
    )
