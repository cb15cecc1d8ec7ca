"""Creates the mesh's exchanges and queues on a broker."""

from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.queue_list import mark_complete

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


async def _is_absent(broker: Broker, queue: str) -> bool:
    return await broker.depth(queue) is None
