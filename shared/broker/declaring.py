"""Creates the mesh's exchanges and queues on a broker."""

import asyncio
from contextlib import suppress

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.queue_list import mark_complete
from shared.contracts.base import Seconds
from shared.contracts.errors import (
    BrokerConflictError,
    MeshError,
    QueueDownError,
    SettingsError,
)

log = structlog.get_logger()
KEEP_PERIOD_S: Seconds = 2.0
"""Period of `keep_topology`."""

STALE_S: Seconds = 35.0
"""Time after which a broker has closed the connection of a host that is gone."""
CLAIM_PERIOD_S: Seconds = 0.5

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
    Create the mesh's objects again if the broker has lost a queue or an exchange, for example
    because it was deleted or the broker has begun again without its data.
    """
    with suppress(MeshError):  # the broker may be away; the next look follows
        exchanges = [
            each.name for each in topology.EXCHANGES if not await broker.has_exchange(each.name)
        ]
        queues = [queue.name for queue in topology.QUEUES if await _is_absent(broker, queue.name)]
        if exchanges or queues:
            log.error("broker.objects_lost", exchanges=exchanges, queues=queues)
            # On a broker that still has others of them, work queues may exist that no list has.
            is_empty = len(queues) == len(topology.QUEUES)
            await (declare_topology(broker) if is_empty else topology.declare(broker))


async def claim_instance(broker: Broker, instance_id: str) -> None:
    """
    Claim an id for the connection of *broker*: two instances with one id would take each other's
    requests. After the death of a host, the broker may keep the old connection for some heartbeats.

    Raises:
        SettingsError: Another agent keeps the id for `STALE_S`.
        BrokerUnavailableError: The broker does not answer.
    """
    left_s, claim = STALE_S, topology.instance_claim(instance_id)
    while True:
        try:
            await broker.declare_queue(claim)
        except BrokerConflictError as error:
            if left_s <= 0:
                raise SettingsError(
                    f"instance_id {instance_id!r} is in use by another agent at this broker: stop "
                    f"that agent, or give this one an id of its own (--set instance_id=NAME)"
                ) from error
            if left_s == STALE_S:
                log.warning("instance.id_in_use", instance_id=instance_id, waits_s=STALE_S)
            left_s -= CLAIM_PERIOD_S
            await asyncio.sleep(CLAIM_PERIOD_S)
        else:
            return


async def _is_absent(broker: Broker, queue: str) -> bool:
    try:
        return await broker.depth(queue) is None
    except QueueDownError:
        return False
