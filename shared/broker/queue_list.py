"""
The durable list of work queues, in which a new leader finds those that exist.

A process adds a queue after it has declared the queue and before it publishes the first request, so
each queue with requests is in the list. The leader replaces the messages of the list by one, and
leaves out queues that it found absent or deleted after it had read these messages. A queue that is
created again is in a later message. Messages are acknowledged after their replacement is confirmed,
so a crash loses no name; repeated names are harmless.
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


@asynccontextmanager
async def rewriting(broker: Broker) -> AsyncIterator[ListedQueues]:
    """
    Context with the contents of the list, whose final value replaces the messages read.

    After an error the messages stay in the list.
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
