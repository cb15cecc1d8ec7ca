"""
The durable list of work queues, from which a new leader learns which queues exist.

A process adds a queue after declaring it and before publishing the first request to it, so the list
contains each queue with requests.

The leader replaces all messages of the list by one message. It leaves out queues that it found
absent or deleted after reading the old messages. If such a queue is created again, a later message
names it. The leader acknowledges the old messages after the broker has confirmed the new one, so a
crash loses no name. Repeated names are harmless.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement
from shared.broker.retry import publish_until_routed
from shared.contracts.base import Decoder, encode, tag_of
from shared.contracts.errors import ContractError, QueueNotFoundError
from shared.contracts.lanes import QueuesListed

log = structlog.get_logger()
_decode: Decoder[QueuesListed] = Decoder(QueuesListed)


@dataclass(slots=True)
class ListedQueues:
    """Contents of the list."""

    queues: set[str] = field(default_factory=set)
    complete: bool = False
    """
    False if a queue with requests may be missing: the list is new, an operator has purged it, or
    another leader holds a part of it.
    """


async def list_queue(broker: Broker, queue: str) -> None:
    """Add *queue* to the list; returns when the broker has confirmed this."""
    await _publish(broker, QueuesListed(queues=(queue,)))


async def mark_complete(broker: Broker) -> None:
    """State that the list has every queue; returns when the broker has confirmed this."""
    await _publish(broker, QueuesListed(queues=(), complete=True))


@asynccontextmanager
async def rewriting(broker: Broker) -> AsyncIterator[ListedQueues]:
    """
    Context with the contents of the list; at its end, the changed contents replace the messages
    that were read.

    After an error the old messages stay in the list.
    """
    taken: list[Delivery] = []
    try:
        listed = await _take(broker, taken)
        yield listed
        contents = QueuesListed(queues=tuple(sorted(listed.queues)), complete=listed.complete)
        await _publish(broker, contents)
    except BaseException:  # also when cancelled
        for delivery in taken:
            await delivery.settle(Settlement.REQUEUE)
        raise
    for delivery in taken:
        await delivery.settle(Settlement.ACK)


async def _take(broker: Broker, taken: list[Delivery]) -> ListedQueues:
    """Read the list; add its messages to *taken* as they arrive."""
    listed, legible = ListedQueues(), True
    with suppress(QueueNotFoundError):  # the next publish creates the list
        while (delivery := await broker.get(topology.WORK_QUEUES)) is not None:
            taken.append(delivery)
            try:
                message = _decode(delivery.body)
            except ContractError as error:
                log.error("queue_list.illegible", error=str(error))
                legible = False
                continue
            listed.queues |= set(message.queues)
            listed.complete |= message.complete
    listed.complete &= legible
    return listed


async def _publish(broker: Broker, message: QueuesListed) -> None:
    out = OutMessage(body=encode(message), kind=tag_of(QueuesListed))
    await publish_until_routed(broker, topology.LANES, topology.WORK_QUEUES, out)
