"""Common steps of the RabbitMQ tests."""

from shared.broker.protocol import (
    BindingSpec,
    Broker,
    Delivery,
    ExchangeSpec,
    ExchangeType,
    QueueSpec,
    QueueType,
)
from shared.contracts.errors import BrokerUnavailableError
from tests.brokers import eventually

WORK = QueueSpec(name="work", delivery_limit=20)
PRIVATE = QueueSpec(name="private", type=QueueType.CLASSIC, durable=False, exclusive=True)


async def declare(broker: Broker, *specs: QueueSpec) -> None:
    await broker.declare_exchange(ExchangeSpec(name="x", type=ExchangeType.DIRECT))
    for spec in specs:
        await broker.declare_queue(spec)
        await broker.bind(BindingSpec(exchange="x", queue=spec.name, routing_key=spec.name))


async def take(broker: Broker, queue: str) -> Delivery:
    taken: list[Delivery] = []

    async def got() -> bool:
        try:
            delivery = await broker.get(queue)
        except BrokerUnavailableError:
            # After a restart, RabbitMQ closes a connection that uses a quorum queue without a
            # leader.
            return False
        taken.extend([delivery] if delivery is not None else [])
        return delivery is not None

    await eventually(got)
    return taken[0]
