"""The events of a server's stream, as they arrive."""

from collections.abc import AsyncIterator

import aiohttp

from services.agent.backends.remote.deltas import check_no_error
from shared.api.events import EventSplitter


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """
    The complete events in each packet of a stream.

    Raises:
        MeshError: The server has sent an error instead of events.
        Exception: One of `LOST`: the connection broke.
    """
    splitter = EventSplitter()
    async for data in response.content.iter_any():
        events = splitter.push(data)
        for event in events:
            check_no_error(event)
        yield events
    check_no_error(splitter.rest)
