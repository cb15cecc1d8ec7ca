"""Cancels the request of a client that disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from litestar.types import Receive

from shared.producer.generation import Generation


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """
    Cancel *generation* when the client disconnects, and always when the block ends.

    The request's body must have been read. Cancelling a finished generation is a no-op.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
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
