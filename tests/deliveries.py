"""Deliveries without a broker, and a broker whose publishes fail when told to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.broker.memory import MemoryBroker
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import Delivery, OutMessage, PublishOutcome, QueueDepth, Settlement
from shared.contracts.errors import BrokerUnavailableError


@dataclass(kw_only=True)
class LooseDelivery:
    """A delivery that remembers how it was settled."""

    body: bytes
    kind: str = ""
    queue: str = "a-queue"
    routing_key: str = "a-queue"
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    user_id: str | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
    redelivered: bool = False
    delivery_count: int = 0
    settlements: list[Settlement] = field(default_factory=list)

    async def settle(self, how: Settlement) -> bool:
        self.settlements.append(how)
        return True


class UnreliableBroker(MemoryBroker):
    """An in-process broker that can be told to refuse confirmed publishes to some exchanges."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub, client_name="unreliable")
        self.down: set[str] = set()
        """Exchanges that answer nothing."""
        self.attempts: list[str] = []
        """Exchanges of all confirmed publishes, tried or done."""
        self.sent: list[str] = []
        """Routing keys of all unconfirmed ones."""
        self.counted: list[str] = []
        """Queues whose depth was asked for."""
        self.while_sending: Callable[[], None] = lambda: None
        """What happens meanwhile, at each unconfirmed publish."""

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        self.attempts.append(exchange)
        if exchange in self.down:
            raise BrokerUnavailableError("the test has taken the broker away")
        return await super().publish(exchange, routing_key, message)

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        self.sent.append(routing_key)
        self.while_sending()
        await super().send(exchange, routing_key, message)

    async def depth(self, queue: str) -> QueueDepth | None:
        self.counted.append(queue)
        return await super().depth(queue)

    async def take(self, queue: str) -> Delivery:
        """The first ready message of *queue*, which must have one; acknowledged."""
        delivery = await self.get(queue)
        assert delivery is not None, f"{queue} is empty"
        await delivery.settle(Settlement.ACK)
        return delivery

    async def ready(self, queue: str) -> int:
        """How many messages of *queue* nobody holds; 0 when there is no such queue."""
        depth = await self.depth(queue)
        return 0 if depth is None else depth.ready
