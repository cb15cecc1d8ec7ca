"""A client that leaves takes its request with it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from litestar.types import Receive

from shared.producer.generation import Generation


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """
    Cancel *generation* when the client disconnects, and in any case when the block ends.

    The request's body must have been read. Cancelling what has finished does nothing.
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
