"""
Interface between Headway and a message broker.

The semantics are RabbitMQ's, reduced to what the mesh uses: durable queues, confirms, acks,
redelivery in order, delivery counts, dead-lettering, bounded queues, single active consumer.
TTL and priority are left out: both differ between RabbitMQ versions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

HeaderValue = str | int | float | bool


class QueueType(Enum):
    """Storage type of a queue."""

    QUORUM = "quorum"
    """Replicated and durable; counts deliveries. For everything that must not be lost."""
    CLASSIC = "classic"
    """Cheaper; for replies and last-value control messages."""


class ExchangeType(Enum):
    """Routing type of an exchange."""

    DIRECT = "direct"
    TOPIC = "topic"
    FANOUT = "fanout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """A durable exchange. Unroutable messages go to `alternate`, if set."""

    name: str
    type: ExchangeType
    alternate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """
    Properties of a queue.

    Declaring an existing queue with another spec is an error, as on RabbitMQ.
    """

    name: str
    type: QueueType = QueueType.QUORUM
    durable: bool = True
    exclusive: bool = False
    """Deleted with the connection that declared it."""
    delivery_limit: int | None = None
    """Deliveries after which a message is dead-lettered (quorum only; limit N allows N+1)."""
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    drop_head: bool = False
    """When full, drop the oldest message; otherwise refuse the publish."""
    single_active_consumer: bool = False
    expires_s: float | None = None
    """
    Time without use after which the broker deletes the queue *with its messages*: never set it on a
    queue that holds work.
    """


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
    """AMQP `type`: the tag of the contract."""
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    persistent: bool = True
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    user_id: str | None = None
    """If set, must equal the connection's user; the broker refuses others."""


class PublishOutcome(Enum):
    """Outcome of a confirmed publish."""

    CONFIRMED = "confirmed"
    """Enqueued; durably if queue and message are."""
    UNROUTABLE = "unroutable"
    """No queue is bound; the message was *not* kept."""
    REFUSED = "refused"
    """A bounded queue is full; the message was *not* kept."""


class Settlement(Enum):
    """End of a delivery."""

    ACK = "ack"
    """The message is done; the broker drops it."""
    REQUEUE = "requeue"
    """Requeue at the original position; counts as a delivery. Only for temporary failures."""
    REJECT = "reject"
    """Dead-letter it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """A message received and not yet acknowledged."""

    body: bytes
    kind: str = ""
    queue: str
    """The queue it was taken from."""
    routing_key: str
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    user_id: str | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
    redelivered: bool = False
    delivery_count: int = 0
    """Earlier deliveries of this message (0 on the first; quorum queues only)."""
    settler: Callable[[Settlement], Awaitable[bool]]
    """Settles the delivery at the broker; returns the same as `settle`."""
    _settled: bool = field(default=False, init=False)
    _outcome: bool = field(default=True, init=False)

    async def settle(self, how: Settlement) -> bool:
        """
        End the delivery, once; later calls do nothing.

        Returns:
            False when the channel of the delivery is gone: the broker has already taken the message
            back and will deliver it again. True does not prove that the broker received the
            settlement.
        """
        if self._settled:
            return self._outcome
        self._settled = True
        try:
            self._outcome = await self.settler(how)
        except asyncio.CancelledError:
            # Nothing was sent, so a later call may still settle the delivery.
            self._settled = False
            raise
        return self._outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """Passive count of a queue. `ready` excludes messages delivered but not settled."""

    ready: int
    consumers: int
    """On quorum queues RabbitMQ also counts holders of unsettled messages from `get`."""


DeliveryHandler = Callable[[Delivery], Awaitable[None]]


class Subscription(Protocol):
    """A running consumer."""

    async def cancel(self) -> None:
        """
        Stop deliveries and wait for running handlers, then free the channel.

        Unsettled deliveries can be settled until the broker is closed.
        """
        ...


class Broker(Protocol):
    """
    A connected broker client.

    Every method may raise `BrokerUnavailableError`; the outcome is then unknown and the
    operation may be repeated with the same message id. The client reconnects by itself and
    restores declarations of exclusive queues, bindings and subscriptions.
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
        """Publish and wait for the broker's answer (mandatory, confirmed)."""
        ...

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        """Publish without waiting: for soft state and token batches. May be lost silently."""
        ...

    async def get(self, queue: str) -> Delivery | None:
        """
        Return the queue's first ready message, or None when there is none.

        Raises:
            QueueNotFoundError: No such queue; the broker logs each attempt, so do not retry often.
        """
        ...

    async def consume(self, queue: str, handler: DeliveryHandler, *, prefetch: int) -> Subscription:
        """
        Call *handler* for each delivery, with at most *prefetch* unsettled at a time.

        Handlers run concurrently; they must settle their delivery and must not raise.

        Raises:
            QueueNotFoundError: No such queue.
        """
        ...

    async def depth(self, queue: str) -> QueueDepth | None:
        """Passive count; None when the queue does not exist."""
        ...

    async def purge(self, queue: str) -> int:
        """Drop all ready messages; return their number."""
        ...

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue *and its messages*, which are not dead-lettered."""
        ...

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        """Call *callback* when the connection that delivers messages is lost."""
        ...

    async def close(self) -> None: ...


BrokerFactory = Callable[[str], AbstractAsyncContextManager[Broker]]
"""Opens a broker connection under a client name shown in the broker's management view."""
