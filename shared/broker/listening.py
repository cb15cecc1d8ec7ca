"""Receives messages from a queue that exists as long as a context."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from shared.broker.protocol import BindingSpec, Broker, Delivery, QueueSpec, Settlement
from shared.contracts.base import Decoder, Message
from shared.contracts.errors import ContractError, MeshError

M = TypeVar("M", bound=Message)
PREFETCH = 256


@asynccontextmanager
async def listening(
    broker: Broker,
    queue: QueueSpec,
    decode: Decoder[M],
    bindings: Sequence[tuple[str, str]],
    on_message: Callable[[M], None],
) -> AsyncIterator[None]:
    """
    Context in which *on_message* is called with each decoded message.

    Messages of other kinds, e.g. from newer versions, are skipped.

    Args:
        queue: Queue that this function declares, e.g. `topology.temporary_queue`. At the end it is
            deleted, so that a client that listens often does not collect queues; without a
            connection, the queue ends with it.
        bindings: Exchange and routing key of each binding.
    """

    async def on_delivery(delivery: Delivery) -> None:
        with suppress(ContractError):
            on_message(decode(delivery.body))
        await delivery.settle(Settlement.ACK)

    await broker.declare_queue(queue)
    try:
        for exchange, key in bindings:
            await broker.bind(BindingSpec(exchange=exchange, queue=queue.name, routing_key=key))
        subscription = await broker.consume(
            queue.name, on_delivery, prefetch=PREFETCH, gathers_acks=True
        )
        try:
            yield
        finally:
            await subscription.cancel()
    finally:
        with suppress(MeshError):
            await broker.delete_queue(queue.name)
