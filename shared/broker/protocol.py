"""
Interface between Headway and a message broker.

The interface has the features of RabbitMQ that the mesh uses: durable queues, confirms, acks,
redelivery in order, delivery counts, dead-lettering, bounded queues, single active consumer, queues
that keep messages for a fixed time, logs that keep what was read. The in-process broker ignores the
lifetime of single messages. Priority, which differs between RabbitMQ versions, is left out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self

from shared.contracts.base import Message, encode, tag_of

HeaderValue = str | int | float | bool
LARGE_BYTES = 1 << 20
"""
Size of a body from which a message has a channel of its own. The broker closes the channel of a
message that is too large for it: 16 MiB in RabbitMQ 4, 128 MiB before.
"""


class QueueType(Enum):
    """Storage type of a queue."""

    QUORUM = "quorum"
    """Replicated and durable queue that counts deliveries; for messages that must not be lost."""
    CLASSIC = "classic"
    """
    Classic queue, which is cheaper; for replies, and for control messages of which only the last
    matters.
    """
    STREAM = "stream"
    """
    Durable log that keeps messages for a time, also after they were read; `Broker.read` reads it.
    """


class ExchangeType(Enum):
    """Routing type of an exchange."""

    DIRECT = "direct"
    TOPIC = "topic"
    FANOUT = "fanout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """A durable exchange. Messages that it cannot route go to the exchange `alternate`, if set."""

    name: str
    type: ExchangeType
    alternate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """
    Properties of a queue.

    Declaring an existing queue with another spec is an error, as in RabbitMQ.
    """

    name: str
    type: QueueType = QueueType.QUORUM
    durable: bool = True
    exclusive: bool = False
    """True if the queue is deleted with the connection that declared it."""
    delivery_limit: int | None = None
    """
    Number of redeliveries of a message after which it is dead-lettered; only for quorum queues.
    """
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    drop_head: bool = False
    """True: a full queue drops its oldest message. False: it refuses the publish."""
    single_active_consumer: bool = False
    expires_s: float | None = None
    """
    Time without use after which the broker deletes the queue *with its messages*. This limit must
    not be set on a queue that holds work.
    """
    message_ttl_s: float | None = None
    """Time after which the queue dead-letters a message that no consumer has taken."""
    max_age_s: float | None = None
    """Time for which a stream keeps messages at least, within `max_length_bytes`."""
    segment_bytes: int | None = None
    """Size of the parts of a stream, which the broker deletes as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingSpec:
    """Binding: messages that are published to `exchange` under `routing_key` reach `queue`."""

    exchange: str
    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutMessage:
    """A message to publish."""

    body: bytes
    kind: str = ""
    """AMQP `type`: the tag of the contract's message."""
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    persistent: bool = True
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    user_id: str | None = None
    """
    User id of the sender; if set, it must equal the connection's user, or the publish is refused.
    """
    expiration_s: float | None = None
    """
    Time after which a queue dead-letters the message, when the message is its first; AMQP's
    `expiration`. A message without time left is dead-lettered at once.
    """

    @classmethod
    def transient(
        cls, message: Message, *, correlation_id: str | None = None, user_id: str | None = None
    ) -> Self:
        """A message of the contracts that need not survive a restart of the broker."""
        return cls(
            body=encode(message),
            kind=tag_of(type(message)),
            correlation_id=correlation_id,
            persistent=False,
            user_id=user_id,
        )


class PublishOutcome(Enum):
    """Outcome of publishing a message with a publisher confirm."""

    CONFIRMED = "confirmed"
    """The message is in a queue, durably if the queue and the message are durable."""
    UNROUTABLE = "unroutable"
    """No queue is bound, so the message was *not* kept."""
    REFUSED = "refused"
    """A bounded queue is full, so the message was *not* kept."""


class Settlement(Enum):
    """Way in which a delivery is settled."""

    ACK = "ack"
    """The message is processed; the broker drops the message."""
    REQUEUE = "requeue"
    """
    The broker requeues the message at its original position; only for temporary failures. The
    requeue counts as a delivery.
    """
    REJECT = "reject"
    """The broker dead-letters the message."""


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """A message received and not yet acknowledged."""

    body: bytes
    kind: str = ""
    queue: str
    """Name of the queue that the message was taken from."""
    routing_key: str
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    user_id: str | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
    redelivered: bool = False
    expiration_s: float | None = None
    """Lifetime with which the message was published."""
    delivery_count: int = 0
    """Number of earlier deliveries of this message; counted in quorum queues only."""
    settler: Callable[[Settlement], Awaitable[bool]]
    """Function that settles the delivery at the broker; its result is that of `settle`."""
    has_returned: Callable[[], bool] = lambda: False
    """
    Function that returns True if the delivery's channel is closed: the broker has requeued the
    message and delivers it again.
    """
    _settled: bool = field(default=False, init=False)
    _outcome: bool = field(default=True, init=False)

    async def settle(self, how: Settlement) -> bool:
        """
        Settle the delivery; calls after the first call do nothing.

        Returns:
            False if the delivery's channel is closed; the broker has then requeued the message and
            delivers it again. True does not prove that the broker received the settlement.
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
    """Message and consumer counts of a queue. `ready` excludes unsettled deliveries."""

    ready: int
    consumers: int
    """Number of consumers; for quorum queues, clients with unsettled `get` messages count also."""


DeliveryHandler = Callable[[Delivery], Awaitable[None]]


class Subscription(Protocol):
    """A running consumer of a queue."""

    async def cancel(self) -> None:
        """
        Stop deliveries to the consumer, wait for running handlers, and free the channel.

        Unsettled deliveries can still be settled until the broker client is closed.
        """
        ...


class Broker(Protocol):
    """
    A connected broker client.

    Every method may raise `BrokerUnavailableError`. The outcome is then unknown, and the caller may
    repeat the operation with the same message id. The client reconnects automatically and restores
    exclusive queues, bindings and subscriptions.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def has_several_nodes(self) -> bool:
        """True if the broker's URL names several nodes, of which one may be lost at any time."""
        ...

    async def declare_exchange(self, spec: ExchangeSpec) -> None: ...

    async def has_exchange(self, name: str) -> bool:
        """Return whether an exchange exists, by a passive declare."""
        ...

    async def declare_queue(self, spec: QueueSpec) -> None:
        """
        Create the queue unless it exists.

        Raises:
            BrokerConflictError: The queue exists with another spec, or belongs to another
                connection.
        """
        ...

    async def bind(self, spec: BindingSpec) -> None: ...
    async def unbind(self, spec: BindingSpec) -> None: ...

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        """Publish a message as mandatory, and wait for the broker's confirm."""
        ...

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        """Publish soft state or tokens without waiting; the message may be lost silently."""
        ...

    async def flush_sent(self) -> None:
        """
        Wait until the broker has routed the messages of `send` so far.

        Only then do messages of `publish` come after them: both use channels of their own, and the
        broker does not order two channels.
        """
        ...

    async def get(self, queue: str) -> Delivery | None:
        """
        Return the queue's first ready message; None if the queue is empty.

        Raises:
            QueueNotFoundError: The queue does not exist. The broker logs each attempt, so do not
                retry often.
        """
        ...

    async def consume(
        self,
        queue: str,
        handler: DeliveryHandler,
        *,
        prefetch: int,
        gathers_acks: bool = False,
        on_broken: Callable[[], None] = lambda: None,
    ) -> Subscription:
        """
        Call *handler* for each delivery, with at most *prefetch* unsettled at a time.

        Handlers run concurrently; they must settle their delivery and must not raise.

        With *gathers_acks*, the broker gets up to half of *prefetch* acknowledgements together, and
        each at most half a second late, which costs less. After a lost connection or a kill, it
        delivers these messages again, unless the queue is exclusive.

        *on_broken* is called, perhaps more than once, when the broker has ended the consumer: its
        connection or channel is lost, or its queue was deleted. Another consumer may get the
        messages then, also after the client has restored this one.

        Raises:
            QueueNotFoundError: The queue does not exist.
        """
        ...

    async def read(self, stream: str, handler: DeliveryHandler, *, prefetch: int) -> Subscription:
        """
        Call *handler* for each message that a stream keeps, from the oldest on, and for each later
        message; the stream keeps what was acknowledged.

        A subscription that was restored begins with the oldest message again.

        Raises:
            QueueNotFoundError: The stream does not exist.
        """
        ...

    async def depth(self, queue: str) -> QueueDepth | None:
        """
        Count the messages and consumers of a queue by a passive declare; None if there is no such
        queue. The count of a stream is late, or 0.
        """
        ...

    async def purge(self, queue: str) -> int:
        """Drop all ready messages of a queue; return their number."""
        ...

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue *and its messages*; the messages are not dead-lettered."""
        ...

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        """Call *callback* when the connection that delivers messages is lost."""
        ...

    async def close(self) -> None: ...


BrokerFactory = Callable[[str], AbstractAsyncContextManager[Broker]]
"""Opens a broker connection; the broker's management view shows the client name."""
