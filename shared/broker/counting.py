"""Passive counts of many queues."""

import asyncio
from collections.abc import Iterable

from shared.broker.protocol import Broker, QueueDepth

COUNTS_AT_ONCE = 8


async def depths_of(broker: Broker, queues: Iterable[str]) -> dict[str, QueueDepth | None]:
    """
    Depth of each queue; None for a queue that does not exist.

    RabbitMQ closes a channel and logs an error for each queue that does not exist.
    """
    limit = asyncio.Semaphore(COUNTS_AT_ONCE)

    async def count(queue: str) -> tuple[str, QueueDepth | None]:
        async with limit:
            return queue, await broker.depth(queue)

    return dict(await asyncio.gather(*(count(queue) for queue in sorted(queues))))
