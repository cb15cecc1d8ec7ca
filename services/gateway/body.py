"""Bodies of requests: read within limits of size, time and memory."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shared.contracts.base import Seconds, TenantId
from shared.contracts.errors import CapacityError, ContractError

DISCARD_BYTES, DISCARD_S = 64 * 2**20, 10.0
RETRY_AFTER_S = 1.0
ENGINE_HEADERS = (b"x-data-parallel-rank", b"x-session-id")
"""Headers that would control vLLM's engine; agents send the second by themselves."""


class RequestBody:
    """
    The body of an HTTP request as it arrives.

    Args:
        receive: The `receive` of ASGI.
        idle_s: Longest time between two parts, and of `whole` for all.
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
        try:
            async with asyncio.timeout(self._idle_s):
                return await self._next()
        except TimeoutError:
            raise _late(f"nothing was sent for {self._idle_s:g} s") from None

    async def whole(
        self,
        limit: int,
        *,
        declared_bytes: int = 0,
        hold: Callable[[int], None] = lambda _num_bytes: None,
    ) -> bytes:
        """
        The whole body.

        Args:
            limit: Largest size in bytes.
            declared_bytes: Size that the client announces; nothing is read if it is too large.
            hold: Called with the size in bytes, as far as it is known; may raise.

        Raises:
            ContractError: The body is too large or too slow, or the client disconnects.
        """
        _check_size(declared_bytes, limit)
        hold(declared_bytes)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._idle_s):
                while (part := await self._next()) is not None:
                    size += len(part)
                    _check_size(size, limit)
                    hold(size)
                    parts.append(part)
        except TimeoutError:
            raise _late(f"it was not complete after {self._idle_s:g} s") from None
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

    async def _next(self) -> bytes | None:
        if self._ended:
            return None
        event = await self._receive()
        if event["type"] == "http.disconnect":
            self._ended = True
            raise ContractError("the client disconnected", code="cancelled", status=499)
        self._ended = not event.get("more_body", False)
        return bytes(event.get("body", b""))


class BodyMemory:
    """
    Bytes that the bodies of open requests take.

    A tenant may have at most as many bytes as are left: alone it gets half of all, and what is left
    is shared by the others in the same way (dynamic thresholds of Choudhury and Hahne).

    Args:
        limit: Bytes for all tenants together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[TenantId] = Counter()
        self.num_bytes = 0
        """Bytes of all tenants."""

    @contextmanager
    def held(self, tenant: TenantId) -> Iterator[Callable[[int], None]]:
        """
        Context of a request of *tenant*, with a function that counts the body's bytes.

        The function gets the size of the whole body as far as it is known, and raises a
        `CapacityError` (status 503) if that is more than the tenant may have. A size below an
        earlier one changes nothing.
        """
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            if (added := num_bytes - held) > 0:
                self._add(tenant, added)
                held = num_bytes

        try:
            yield hold
        finally:
            self._held[tenant] -= held
            self.num_bytes -= held
            if not self._held[tenant]:
                del self._held[tenant]

    def _add(self, tenant: TenantId, num_bytes: int) -> None:
        own, left = self._held[tenant], self._limit - self.num_bytes
        if own + num_bytes > left - num_bytes:
            raise CapacityError(
                f"the bodies of tenant {tenant} may take {(own + left) // 2} bytes at this gateway "
                f"now, and those of all tenants {self._limit} (max_open_body_bytes)",
                retry_after_s=RETRY_AFTER_S,
                status=503,
            )
        self._held[tenant] += num_bytes
        self.num_bytes += num_bytes


class Forwarded:
    """
    Request for an application: the body in one part, followed by the client's events.

    Args:
        scope: Scope of the client's request.
        receive: The `receive` of ASGI.
        body: Body for the application.
        on_left: Called when the client has left.
    """

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Any,
        body: bytes,
        *,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        own = {b"content-length": str(len(body)).encode()}
        dropped = {*own, *ENGINE_HEADERS}
        headers = [each for each in scope["headers"] if each[0] not in dropped]
        self.scope = {**scope, "headers": [*headers, *own.items()]}
        self._receive = receive
        self._body: bytes | None = body
        self._on_left = on_left

    async def receive(self) -> Any:
        """The next ASGI event."""
        if self._body is None:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                self._on_left()
            return event
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def declared_bytes(headers: Mapping[str, str]) -> int:
    """The header `Content-Length`; 0 without it."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _check_size(num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise ContractError(
            f"the body is too large: the limit is {limit} bytes",
            code="body_too_large",
            status=413,
        )


def _late(reason: str) -> ContractError:
    return ContractError(
        f"the body did not arrive in time: {reason}", code="body_timeout", status=408
    )
