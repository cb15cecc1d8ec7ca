"""The HTTP response of an engine, with the mesh's headers, results and errors."""

import re
from typing import Any

from services.gateway.call import Call
from services.gateway.channel import ERROR_STATUSES
from services.gateway.edge.forms import ApiForm
from services.gateway.errors import error_headers
from services.gateway.headers import id_headers
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.results import with_headway
from shared.contracts.requests import ErrorInfo, RequestCompleted

EVENT_STREAM = b"text/event-stream"
JSON = b"application/json"
_LAST = re.compile(rb'"(?:finish_reason|stop_reason)": ?"|"status": ?"completed"')
"""Part of the event that ends the text of an answer; some servers write spaces."""


class Response:
    """
    Passes the ASGI events of an answer to the client.

    The status line waits for the first part of the body. If the call has failed by then, the client
    gets the mesh's error with the error's own status.

    Args:
        send: The `send` of ASGI.
        call_id: Id of the call, sent as a header.
        client_id: Id that the client sent, which is returned.
        form: Form of errors in the route's API.
    """

    def __init__(self, send: Any, call_id: str, client_id: str | None, form: ApiForm) -> None:
        self.call: Call | None = None
        self._send = send
        self._form = form
        self.headers = id_headers(call_id, client_id)
        """Headers that every answer has."""
        self._start: dict[str, Any] | None = None
        """Event with the status line, until it is sent."""
        self._status: int | None = None
        """HTTP status that was sent; None before."""
        self._stream = False
        self._parts: list[bytes] = []
        """Parts of an answer that is not streamed."""
        self._ended = False
        self._is_left = False
        """True if the client has left before the end."""

    def add_headers(self, headers: dict[str, str]) -> None:
        """Add headers to the answer, before it begins."""
        self.headers |= headers

    async def send(self, event: dict[str, Any]) -> None:
        """Process one ASGI event of the answer."""
        if self._ended:
            return
        if event["type"] == "http.response.start":
            self._start = event
            self._stream = _is_stream(event)
        elif event["type"] == "http.response.body":
            body, more = event.get("body", b""), event.get("more_body", False)
            if self._stream:
                await self._stream_part(body, more=more)
            else:
                await self._whole_part(body, more=more)
        else:
            await self._send(event)

    async def fail(self, info: ErrorInfo) -> Outcome:
        """End the response with an error, which is an event if the status line has been sent."""
        if not self._ended and self._status is not None:
            await self._body(self._form.event(info) if self._stream else b"", more=False)
        elif not self._ended:
            status = info.status if info.status in ERROR_STATUSES else 500
            await self._begin(status, error_headers(info))
            await self._body(self._form.error_body(info), more=False)
        return outcome_of(info)

    def left(self) -> None:
        """Note that the client has left; after the end of the answer, this changes nothing."""
        self._is_left = not self._ended

    def outcome(self) -> Outcome:
        """Outcome of the call after the end of the application."""
        if self._is_left:
            return Outcome.CANCELLED
        if self.call is not None and self.call.failure is not None:
            return outcome_of(self.call.failure)
        if self._status is None or not self._ended:
            return Outcome.CANCELLED
        return Outcome.REFUSED if self._status in ERROR_STATUSES else Outcome.COMPLETED

    async def _stream_part(self, body: bytes, *, more: bool) -> None:
        if self._status is None:
            if not body and more:
                return
            if self.call is not None and self.call.failure is not None:
                await self.fail(self.call.failure)
                return
            await self._pass_start()
        call = self.call
        # Search only ended calls for the last event: this runs for each token.
        if call and call.final is not None and _LAST.search(body):
            body = _with_results(body, call.final)
        await self._body(body, more=more)

    async def _whole_part(self, body: bytes, *, more: bool) -> None:
        self._parts.append(body)
        if more:
            return
        if self.call is not None and self.call.failure is not None:
            await self.fail(self.call.failure)
            return
        whole = b"".join(self._parts)
        final = None if self.call is None else self.call.final
        if final is not None and _is_object(self._start, whole):
            whole = with_headway(whole, final)
        await self._pass_start(length=len(whole))
        await self._body(whole, more=False)

    async def _pass_start(self, length: int | None = None) -> None:
        start = self._start or {"status": 500, "headers": []}
        headers = [each for each in start["headers"] if each[0].lower() != b"content-length"]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._status = start["status"]
        await self._send({**start, "headers": [*headers, *self._encoded()]})

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        self.add_headers(headers)
        kind = [(b"content-type", JSON)]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*kind, *self._encoded()],
            }
        )

    def _encoded(self) -> list[tuple[bytes, bytes]]:
        pairs = self.headers.items()
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in pairs]

    async def _body(self, data: bytes, *, more: bool) -> None:
        self._ended = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _is_object(start: dict[str, Any] | None, body: bytes) -> bool:
    """True if the body is a JSON object; vectors may also be sent as bytes."""
    headers = [] if start is None else start["headers"]
    kinds = [value for name, value in headers if name.lower() == b"content-type"]
    return body.endswith(b"}") and all(kind.startswith(JSON) for kind in kinds)


def _is_stream(start: dict[str, Any]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(EVENT_STREAM)
        for name, value in start["headers"]
    )


def _with_results(event: bytes, final: RequestCompleted) -> bytes:
    """*event* with the mesh's results in its last JSON object."""
    head, brace, tail = event.rpartition(b"}")
    return with_headway(head + brace, final) + tail if brace else event
