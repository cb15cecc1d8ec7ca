"""Sending one HTTP answer over ASGI."""

import asyncio

from starlette.types import Message, Send

from services.gateway.errors import error_body, error_headers
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError
from shared.contracts.requests import ErrorInfo

JSON = "application/json"
ERROR_STATUSES = range(400, 600)
EVENT_STREAM = "text/event-stream; charset=utf-8"


class UnreadError(MeshError):
    """The client does not read its answer."""


class Channel:
    """
    Response channel to the HTTP client.

    Every method that sends raises `UnreadError` if the client does not read.

    Args:
        send: The `send` of ASGI.
        headers: Headers that every answer has.
        unread_s: Longest time for which the client may not take a part; None: no limit.
    """

    def __init__(
        self, send: Send, headers: dict[str, str], *, unread_s: Seconds | None = None
    ) -> None:
        self._to_client = send
        self._unread_s = unread_s
        self.headers = headers
        """Headers that every answer has."""
        self.started = False
        """
        True once the status line was sent; a later error can only be sent as an event of the
        stream.
        """

    def add_headers(self, headers: dict[str, str]) -> None:
        """Add headers to the answer, before it begins."""
        self.headers = self.headers | headers

    async def error(self, info: ErrorInfo, *, headers: dict[str, str] | None = None) -> None:
        """Send an error answer to the client, with further *headers*."""
        # The status may come from another service; an error must never look like a success.
        status = info.status if info.status in ERROR_STATUSES else 500
        await self.json(
            error_body(info), status=status, headers=error_headers(info) | (headers or {})
        )

    async def json(
        self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Send a complete JSON answer to the client."""
        length = {"content-type": JSON, "content-length": str(len(body))}
        await self._start(status, length | (headers or {}))
        await self._body(body, more=False)

    async def begin(self, *, headers: dict[str, str]) -> None:
        """Send the status line of an answer whose parts follow."""
        await self._start(200, headers)

    async def part(self, data: bytes) -> None:
        """Send a part of an answer that was begun."""
        await self._body(data, more=True)

    async def event(self, data: bytes) -> None:
        """Send server-sent events; the first call also sends the status line."""
        if not self.started:
            # Proxies must not buffer events.
            await self._start(
                200,
                {
                    "content-type": EVENT_STREAM,
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
        await self._body(data, more=True)

    async def end(self) -> None:
        """End an answer that was sent in parts."""
        await self._body(b"", more=False)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (name.encode("latin-1"), value.encode("latin-1"))
                    for name, value in (self.headers | headers).items()
                ],
            }
        )

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._unread_s):
                await self._to_client(message)
        except TimeoutError as error:
            raise UnreadError(f"the client has read nothing for {self._unread_s:g} s") from error
