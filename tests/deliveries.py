"""Deliveries without a broker, and a broker whose publishes fail on demand."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Delivery, OutMessage, PublishOutcome, QueueDepth, Settlement
from shared.contracts.errors import BrokerUnavailableError, MessageTooLargeError


@dataclass(kw_only=True, eq=False)
class LooseDelivery(Delivery):
    """A delivery that records its settlement."""

    queue: str = "a-queue"
    routing_key: str = "a-queue"
    settler: Callable[[Settlement], Awaitable[bool]] = field(init=False)
    settlements: list[Settlement] = field(default_factory=list)

    async def settle(self, how: Settlement) -> bool:
        self.settlements.append(how)
        return True


class UnreliableBroker(MemoryBroker):
    """An in-process broker that refuses confirmed publishes to selected exchanges."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub, client_name="unreliable")
        self.down: set[str] = set()
        """Exchanges whose publishes fail."""
        self.max_message_size: int | None = None
        """Size in bytes above which messages are refused."""
        self.attempts: list[str] = []
        """Exchanges of all confirmed publishes, attempted or completed."""
        self.sent: list[str] = []
        """Routing keys of all unconfirmed publishes."""
        self.counted: list[str] = []
        """Queues whose depth was requested."""
        self.while_sending: Callable[[], None] = lambda: None
        """Function that is called during each unconfirmed publish."""
        self.late: list[tuple[str, str, OutMessage]] | None = None
        """If set, unconfirmed replies, which arrive only when `flush_sent` waits for them."""

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        self.attempts.append(exchange)
        if exchange in self.down:
            raise BrokerUnavailableError("the test has stopped the broker")
        self._check_size(message)
        return await super().publish(exchange, routing_key, message)

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        self.sent.append(routing_key)
        self.while_sending()
        self._check_size(message)
        if self.late is not None and exchange == topology.REPLIES:
            self.late.append((exchange, routing_key, message))
            return
        await super().send(exchange, routing_key, message)

    async def flush_sent(self) -> None:
        for each in self.late or ():
            await super().send(*each)
        if self.late is not None:
            self.late.clear()

    async def depth(self, queue: str) -> QueueDepth | None:
        self.counted.append(queue)
        return await super().depth(queue)

    def _check_size(self, message: OutMessage) -> None:
        size, limit = len(message.body), self.max_message_size
        if limit is not None and size > limit:
            raise MessageTooLargeError(f"the message has {size} bytes, and the limit is {limit}")

    async def take(self, queue: str) -> Delivery:
        """Take and acknowledge the first ready message of *queue*, which must not be empty."""
        delivery = await self.get(queue)
        assert delivery is not None, f"{queue} is empty"
        await delivery.settle(Settlement.ACK)
        return delivery

    async def ready(self, queue: str) -> int:
        """Number of ready messages in *queue*; 0 if the queue does not exist."""
        depth = await self.depth(queue)
        return 0 if depth is None else depth.ready
