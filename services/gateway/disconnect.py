"""Waits for the disconnection of a client, and cancels its request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from shared.producer.generation import Generation


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; what is left of its body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """
    Context that cancels *generation* when the client disconnects, and at its end.

    The body of the request must have been read before. Cancelling a finished generation is a no-op.
    """

    async def watch() -> None:
        await disconnected(receive)
        await generation.cancel()

    task = asyncio.create_task(watch(), name=f"disconnect of {generation.request_id}")
    try:
        yield
    finally:
        task.cancel()
        try:
            await generation.cancel()
        finally:
            await asyncio.wait({task})
