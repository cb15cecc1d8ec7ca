"""
The seam between Headway and a message broker.

The semantics are RabbitMQ's, reduced to what the mesh uses: durable queues, confirms, acks,
redelivery in order, delivery counts, dead-lettering, bounded queues, single active consumer.
There is no TTL and no priority here: both differ between RabbitMQ versions.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

HeaderValue = str | int | float | bool


class QueueType(Enum):
    """How a queue is stored."""

    QUORUM = "quorum"
    """Replicated and durable; counts deliveries. Everything that must not be lost."""
    CLASSIC = "classic"
    """Cheaper; for replies and last-value control."""


class ExchangeType(Enum):
    """How an exchange routes."""

    DIRECT = "direct"
    TOPIC = "topic"
    FANOUT = "fanout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """A durable exchange. Messages it cannot route go to `alternate`, if there is one."""

    name: str
    type: ExchangeType
    alternate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """
    A queue and how it behaves.

    Declaring an existing queue with another spec is an error, as on RabbitMQ.
    """

    name: str
    type: QueueType = QueueType.QUORUM
    durable: bool = True
    exclusive: bool = False
    """Lives and dies with the connection that declared it."""
    delivery_limit: int | None = None
    """Deliveries after which a message is dead-lettered (quorum only; limit N allows N+1)."""
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    drop_head: bool = False
    """When full: drop the oldest. Otherwise refuse the publish."""
    single_active_consumer: bool = False
    expires_s: float | None = None
    """Delete when unused that long. Deletes *messages* too: never on a queue that holds work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingSpec:
    """Messages published to `exchange` under `routing_key` reach `queue`."""

    exchange: str
    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutMessage:
    """A message to publish."""

    body: bytes
    kind: str = ""
    """AMQP `type`: the contract's tag."""
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    persistent: bool = True
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    user_id: str | None = None
    """Must equal the connection's user when set; the broker refuses another."""


class PublishOutcome(Enum):
    """What became of a confirmed publish."""

    CONFIRMED = "confirmed"
    """On a queue, durably if queue and message are."""
    UNROUTABLE = "unroutable"
    """Nobody is bound; the message was *not* kept."""
    REFUSED = "refused"
    """A bounded queue is full; the message was *not* kept."""


class Settlement(Enum):
    """How a delivery ends."""

    ACK = "ack"
    """Done; forget it."""
    REQUEUE = "requeue"
    """Back to where it was; counts as a delivery. Only for trouble that may pass."""
    REJECT = "reject"
    """Dead-letter it."""


class Delivery(Protocol):
    """A message in our hands, unacknowledged."""

    @property
    def body(self) -> bytes: ...
    @property
    def kind(self) -> str: ...
    @property
    def queue(self) -> str:
        """The queue it was taken from."""
        ...

    @property
    def routing_key(self) -> str: ...
    @property
    def message_id(self) -> str | None: ...
    @property
    def correlation_id(self) -> str | None: ...
    @property
    def reply_to(self) -> str | None: ...
    @property
    def user_id(self) -> str | None: ...
    @property
    def headers(self) -> Mapping[str, object]: ...
    @property
    def redelivered(self) -> bool: ...
    @property
    def delivery_count(self) -> int:
        """Earlier deliveries of this message (0 on the first; quorum queues only)."""
        ...

    async def settle(self, how: Settlement) -> bool:
        """
        End the delivery, once; later calls do nothing.

        Returns:
            False when the channel it came on is gone: the broker has already taken the
            message back and will deliver it again. True proves nothing about the broker.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """Passive count of a queue. `ready` excludes what is delivered but not settled."""

    ready: int
    consumers: int
    """On quorum queues RabbitMQ also counts whoever holds unsettled messages from `get`."""


DeliveryHandler = Callable[[Delivery], Awaitable[None]]


class Subscription(Protocol):
    """A running consumer."""

    async def cancel(self) -> None:
        """
        Stop deliveries and wait for running handlers, then free the channel.

        Unsettled deliveries stay settleable until the broker is closed.
        """
        ...


class Broker(Protocol):
    """
    A connected broker client.

    Every method may raise `BrokerUnavailableError`; after that the outcome is unknown and
    the same operation, with the same message id, may be tried again. The client reconnects
    by itself and restores declarations of exclusive queues, bindings and subscriptions.
    """

    @property
    def connected(self) -> bool: ...

    async def declare_exchange(self, spec: ExchangeSpec) -> None: ...

    async def declare_queue(self, spec: QueueSpec) -> None:
        """
        Create the queue unless it exists.

        Raises:
            BrokerConflictError: It exists with another spec, or belongs to another connection.
        """
        ...

    async def bind(self, spec: BindingSpec) -> None: ...
    async def unbind(self, spec: BindingSpec) -> None: ...

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        """Publish and wait for the broker's word (mandatory, confirmed)."""
        ...

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        """Publish without waiting: for soft state and token batches. May be lost silently."""
        ...

    async def get(self, queue: str) -> Delivery | None:
        """
        The queue's first ready message, or None when there is none.

        Raises:
            QueueNotFoundError: No such queue; the broker logs it, so do not ask often.
        """
        ...

    async def consume(self, queue: str, handler: DeliveryHandler, *, prefetch: int) -> Subscription:
        """
        Call *handler* for each delivery, at most *prefetch* unsettled at a time.

        Handlers run concurrently and must settle their delivery and not raise.

        Raises:
            QueueNotFoundError: No such queue.
        """
        ...

    async def depth(self, queue: str) -> QueueDepth | None:
        """Passive count; None when the queue does not exist."""
        ...

    async def purge(self, queue: str) -> int:
        """Drop all ready messages; how many."""
        ...

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue *and its messages*, which are not dead-lettered."""
        ...

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        """Call *callback* when the connection that deliveries came on has gone."""
        ...

    async def close(self) -> None: ...


BrokerFactory = Callable[[str], AbstractAsyncContextManager[Broker]]
"""Connects under a client name shown in the broker's management view."""
