"""The consumer's end of one request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.contracts.base import RequestId
from shared.contracts.errors import MeshError
from shared.contracts.requests import Final
from shared.producer.effects import NewTokens


class RunDivergedError(MeshError):
    """
    A replayed run contradicts tokens that were already handed out; the stream cannot go on.

    `Generation.final` still gives the complete answer of the run that finishes.
    """

    code = "run_diverged"


class Generation:
    """
    A request on its way through the mesh; the producer fills it, one consumer reads it.

    Iteration gives each part of the answer once, and ends with the request: whether it ended well
    is what `final` says. With `ReplyMode.FINAL` the whole answer comes as one part.

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
                raise RunDivergedError("a replayed run gave other tokens than those sent before")
            if self._final.done():
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._parts.popleft()

    async def final(self) -> Final:
        """How the request ended: complete on success, else the error."""
        return await asyncio.shield(self._final)

    async def cancel(self) -> None:
        """
        Give the request up, wherever it is; it ends here as failed with code `cancelled`.

        Takes effect before the first suspension; what is awaited is the broker's word.
        Harmless when the request is over.
        """
        await self._cancel(self.request_id)

    def append(self, part: NewTokens) -> None:
        """The producer's side: the next part of the answer."""
        self._parts.append(part)
        self._changed.set()

    def diverge(self) -> None:
        """The producer's side: no further part can be given."""
        self._diverged = True
        self._changed.set()

    def finish(self, final: Final) -> None:
        """The producer's side: the request is over."""
        if not self._final.done():
            self._final.set_result(final)
        self._changed.set()
