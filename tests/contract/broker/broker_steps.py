"""Common steps of the broker contract tests."""

from shared.broker.protocol import (
    BindingSpec,
    Broker,
    Delivery,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    PublishOutcome,
    QueueSpec,
    QueueType,
    Settlement,
)
from tests.brokers import eventually

WORK = QueueSpec(name="work", delivery_limit=20, dead_letter_exchange="dead")
DEAD = QueueSpec(name="dead-letters")
CLASSIC = QueueSpec(name="classic", type=QueueType.CLASSIC)
PRIVATE = QueueSpec(name="private", type=QueueType.CLASSIC, durable=False, exclusive=True)


async def declare(broker: Broker, *specs: QueueSpec) -> None:
    """Declare queues bound to exchange `x` under their own names."""
    await broker.declare_exchange(ExchangeSpec(name="x", type=ExchangeType.DIRECT))
    await broker.declare_exchange(ExchangeSpec(name="dead", type=ExchangeType.FANOUT))
    for spec in specs:
        await broker.declare_queue(spec)
        await broker.bind(BindingSpec(exchange="x", queue=spec.name, routing_key=spec.name))


async def declare_dead(broker: Broker) -> None:
    await broker.declare_queue(DEAD)
    await broker.bind(BindingSpec(exchange="dead", queue=DEAD.name, routing_key=""))


async def publish(broker: Broker, queue: str, *bodies: str) -> list[PublishOutcome]:
    return [await broker.publish("x", queue, OutMessage(body=body.encode())) for body in bodies]


async def take(broker: Broker, queue: str) -> Delivery:
    """Return the next message, waiting until the broker has it ready."""
    taken: list[Delivery] = []

    async def got() -> bool:
        delivery = await broker.get(queue)
        if delivery is not None:
            taken.append(delivery)
        return delivery is not None

    await eventually(got)
    return taken[0]


async def take_bodies(broker: Broker, queue: str, count: int) -> list[str]:
    """Return the bodies of the next *count* messages, acknowledged."""
    bodies = []
    for _ in range(count):
        delivery = await take(broker, queue)
        bodies.append(delivery.body.decode())
        await delivery.settle(Settlement.ACK)
    return bodies


async def wait_ready(broker: Broker, queue: str, ready: int) -> None:
    async def reached() -> bool:
        depth = await broker.depth(queue)
        return depth is not None and depth.ready == ready

    await eventually(reached)


class Recorder:
    """A handler that keeps deliveries without settling them."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    async def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    @property
    def bodies(self) -> list[str]:
        return [delivery.body.decode() for delivery in self.deliveries]

    async def wait(self, count: int) -> None:
        await eventually(lambda: len(self.deliveries) >= count)
