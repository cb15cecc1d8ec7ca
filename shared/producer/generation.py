"""The consumer's handle of one request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.contracts.base import RequestId
from shared.contracts.errors import MeshError
from shared.contracts.requests import Final
from shared.producer.effects import NewTokens


class RunDivergedError(MeshError):
    """
    A replayed run contradicts tokens that were already emitted; the stream cannot continue.

    `Generation.final` still gives the complete answer of the run that finishes.
    """

    code = "run_diverged"


class Generation:
    """
    A request in progress; the producer fills it, one consumer reads it.

    Iteration yields each part of the answer once and ends with the request; `final` reports
    success or failure. With `ReplyMode.FINAL` the whole answer comes as one part.

    Raises:
        RunDivergedError: While iterating, in streaming mode only.
    """

    def __init__(
        self, request_id: RequestId, *, cancel: Callable[[RequestId], Awaitable[None]]
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._parts: deque[NewTokens] = deque()
        self._changed = asyncio.Event()
        self._final: asyncio.Future[Final] = asyncio.get_running_loop().create_future()
        self._diverged = False

    def __aiter__(self) -> AsyncIterator[NewTokens]:
        return self

    async def __anext__(self) -> NewTokens:
        while not self._parts:
            if self._diverged:
                raise RunDivergedError(
                    "a replayed run gave tokens that differ from those sent before"
                )
            if self._final.done():
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._parts.popleft()

    async def final(self) -> Final:
        """Return the request's final: the complete answer on success, else the error."""
        return await asyncio.shield(self._final)

    async def cancel(self) -> None:
        """
        Cancel the request, wherever it is; it ends here as failed with code `cancelled`.

        The cancellation takes effect before the first suspension; the await only waits for the
        broker's answer. Harmless when the request is over.
        """
        await self._cancel(self.request_id)

    def append(self, part: NewTokens) -> None:
        """Called by the producer: add the next part of the answer."""
        self._parts.append(part)
        self._changed.set()

    def diverge(self) -> None:
        """Called by the producer: end the stream, as no further part can be given."""
        self._diverged = True
        self._changed.set()

    def finish(self, final: Final) -> None:
        """Called by the producer: the request is over."""
        if not self._final.done():
            self._final.set_result(final)
        self._changed.set()
