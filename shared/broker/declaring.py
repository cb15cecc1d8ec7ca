"""Creates the mesh's exchanges and queues on a broker."""

from contextlib import suppress

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.queue_list import mark_complete
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError, QueueDownError

log = structlog.get_logger()
KEEP_PERIOD_S: Seconds = 2.0
"""Period of `keep_topology`."""

EARLIER_QUEUE = "headway.obituaries"
"""Queue of the versions without a list of work queues."""


async def declare_topology(broker: Broker) -> None:
    """
    Create every exchange, queue and binding of the mesh; idempotent.

    On a broker that no mesh has used, the list of work queues is complete from the beginning, so
    that the first leader does not count every possible queue.
    """
    is_new = await _is_absent(broker, topology.WORK_QUEUES) and await _is_absent(
        broker, EARLIER_QUEUE
    )
    await topology.declare(broker)
    # The user of this process may lack the permission to declare the list.
    if is_new and not await _is_absent(broker, topology.WORK_QUEUES):
        await mark_complete(broker)


async def keep_topology(broker: Broker) -> None:
    """
    Create the mesh's objects again if the broker has lost a queue, for example because it was
    deleted or the broker has begun again without its data.
    """
    with suppress(MeshError):  # the broker may be away; the next look follows
        lost = [queue.name for queue in topology.QUEUES if await _is_absent(broker, queue.name)]
        if lost:
            log.error("broker.queues_lost", queues=lost)
            # On a broker that still has others of them, work queues may exist that no list has.
            is_empty = len(lost) == len(topology.QUEUES)
            await (declare_topology(broker) if is_empty else topology.declare(broker))


async def _is_absent(broker: Broker, queue: str) -> bool:
    try:
        return await broker.depth(queue) is None
    except QueueDownError:
        return False
