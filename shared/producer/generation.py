"""A consumer's access to the answer of one request."""

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

    `Generation.final` still returns the complete answer when a run finishes.
    """

    code = "run_diverged"


class Generation:
    """
    A request in progress: the producer adds parts of the answer, and one consumer reads them.

    Iteration yields each part of the answer once and ends with the request. `final` returns the
    success or failure. With `ReplyMode.FINAL` the whole answer is one part.

    Raises:
        RunDivergedError: A replayed run contradicts emitted tokens; only while iterating in
            streaming mode.
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
                    "a replayed run generated tokens that differ from those sent before"
                )
            if self._final.done():
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._parts.popleft()

    async def final(self) -> Final:
        """Return the final reply of the request: the complete answer or the error."""
        return await asyncio.shield(self._final)

    async def cancel(self) -> None:
        """
        Cancel the request, wherever it is; the request ends as failed with the code `cancelled`.

        The request ends for its consumer immediately; the call then only waits for the broker's
        answer. No-op if the request has ended.
        """
        await self._cancel(self.request_id)

    def append(self, part: NewTokens) -> None:
        """Add the next part of the answer; the producer calls this method."""
        self._parts.append(part)
        self._changed.set()

    def diverge(self) -> None:
        """End the stream, since no further part can be emitted; the producer calls this method."""
        self._diverged = True
        self._changed.set()

    def finish(self, final: Final) -> None:
        """End the request with its final reply; the producer calls this method."""
        if not self._final.done():
            self._final.set_result(final)
        self._changed.set()
