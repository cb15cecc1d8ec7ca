"""Passive counts of many queues."""

import asyncio
from collections.abc import Iterable

from shared.broker.protocol import Broker

COUNTS_AT_ONCE = 8


async def count_queues(broker: Broker, queues: Iterable[str]) -> dict[str, int | None]:
    """
    Ready messages of each queue; None for a queue that does not exist.

    RabbitMQ closes a channel and logs an error for each queue that does not exist.
    """
    limit = asyncio.Semaphore(COUNTS_AT_ONCE)

    async def count(queue: str) -> tuple[str, int | None]:
        async with limit:
            depth = await broker.depth(queue)
        return queue, None if depth is None else depth.ready

    return dict(await asyncio.gather(*(count(queue) for queue in sorted(queues))))
