"""`Broker` in the same process, for tests and the zero-infrastructure start."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from shared.broker.memory_delivery import MemoryDelivery, MemorySession, MemorySubscription
from shared.broker.memory_hub import MemoryHub
from shared.broker.memory_queue import MemoryQueue
from shared.broker.protocol import (
    BindingSpec,
    DeliveryHandler,
    ExchangeSpec,
    OutMessage,
    PublishOutcome,
    QueueDepth,
    QueueSpec,
    QueueType,
)
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerUnavailableError,
    QueueNotFoundError,
)

log = structlog.get_logger()


class MemoryBroker:
    """
    A client of a `MemoryHub`.

    Args:
        hub: The server, shared by all clients.
        client_name: For logs.
        user: Whom the connection belongs to; a message may claim no other.
    """

    def __init__(self, hub: MemoryHub, *, client_name: str = "", user: str = "guest") -> None:
        self._hub = hub
        self._client_name = client_name
        self._user = user
        self._session = MemorySession()
        self._exclusive: dict[str, QueueSpec] = {}
        self._bindings: dict[BindingSpec, None] = {}
        self._subscriptions: dict[MemorySubscription, None] = {}
        self._lost_callbacks: list[Callable[[], None]] = []
        self._entered = False

    async def __aenter__(self) -> Self:
        self._hub.enter(self)
        self._entered = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._entered and self._session.open

    async def declare_exchange(self, spec: ExchangeSpec) -> None:
        self._check()
        self._hub.declare_exchange(spec)

    async def declare_queue(self, spec: QueueSpec) -> None:
        self._check()
        self._hub.declare_queue(spec, self)
        if spec.exclusive:
            self._exclusive[spec.name] = spec

    async def bind(self, spec: BindingSpec) -> None:
        self._check()
        self._hub.bind(spec, self)
        if spec.queue in self._exclusive:
            self._bindings[spec] = None

    async def unbind(self, spec: BindingSpec) -> None:
        self._check()
        self._hub.unbind(spec)
        self._bindings.pop(spec, None)

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        self._check()
        self._check_user(message)
        outcome = self._hub.publish(exchange, routing_key, message)
        # A loop of publishes must let consumers run, as it would with a network between.
        await asyncio.sleep(0)
        return outcome

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        self._check()
        try:
            self._check_user(message)
            self._hub.publish(exchange, routing_key, message)
        except BrokerConflictError as error:
            # RabbitMQ says so too late for the sender to hear.
            log.warning("message.rejected", exchange=exchange, error=str(error))
        await asyncio.sleep(0)

    async def get(self, queue: str) -> MemoryDelivery | None:
        self._check()
        await asyncio.sleep(0)
        self._check()
        source = self._existing(queue)
        if source.spec.single_active_consumer and source.spec.type is QueueType.QUORUM:
            raise BrokerConflictError(f"queue {queue!r} has a single active consumer")
        stored = source.take()
        return None if stored is None else MemoryDelivery(source, stored, self._session)

    async def consume(
        self, queue: str, handler: DeliveryHandler, *, prefetch: int
    ) -> MemorySubscription:
        self._check()
        source = self._existing(queue)
        subscription = MemorySubscription(
            queue, handler, prefetch=prefetch, on_cancelled=self._forget
        )
        self._subscriptions[subscription] = None
        subscription.attach(source, self._session)
        return subscription

    async def depth(self, queue: str) -> QueueDepth | None:
        self._check()
        found = self._hub.find(queue, self)
        if found is None:
            return None
        return QueueDepth(ready=found.num_ready, consumers=found.num_consumers)

    async def purge(self, queue: str) -> int:
        self._check()
        return self._existing(queue).purge()

    async def delete_queue(self, queue: str) -> None:
        self._check()
        if self._hub.find(queue, self) is not None:
            self._hub.delete_queue(queue)
        self._exclusive.pop(queue, None)
        for spec in [spec for spec in self._bindings if spec.queue == queue]:
            del self._bindings[spec]

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        self._lost_callbacks.append(callback)

    async def close(self) -> None:
        """Close; idempotent. Unsettled deliveries go back to their queues, in order."""
        if not self._entered:
            return
        self._entered = False
        self._hub.leave(self)
        subscriptions = tuple(self._subscriptions)
        self._end_session()
        for subscription in subscriptions:
            await subscription.close()

    def drop_connection(self) -> None:
        """Lose the connection and get it back at once, as after a network fault."""
        self.lose_connection()
        if self._hub.running:
            self.reconnect()

    def lose_connection(self) -> None:
        """For the hub: the connection ends."""
        if not self._session.open:
            return
        self._end_session()
        for callback in self._lost_callbacks:
            callback()

    def reconnect(self) -> None:
        """For the hub: connect again and restore what lived on the connection."""
        if self._session.open or not self._entered:
            return
        self._session = MemorySession()
        for spec in self._exclusive.values():
            self._hub.declare_queue(spec, self)
        for binding in self._bindings:
            self._hub.bind(binding, self)
        for subscription in self._subscriptions:
            source = self._hub.find(subscription.queue, self)
            if source is not None:
                subscription.attach(source, self._session)

    def _end_session(self) -> None:
        for subscription in self._subscriptions:
            subscription.detach()
        self._session.end()
        for name in self._exclusive:
            self._hub.delete_queue(name)

    def _existing(self, queue: str) -> MemoryQueue:
        found = self._hub.find(queue, self)
        if found is None:
            raise QueueNotFoundError(f"no queue {queue!r}")
        return found

    def _forget(self, subscription: MemorySubscription) -> None:
        self._subscriptions.pop(subscription, None)

    def _check(self) -> None:
        if not self.connected:
            raise BrokerUnavailableError(f"{self._client_name or 'client'} is not connected")

    def _check_user(self, message: OutMessage) -> None:
        if message.user_id is not None and message.user_id != self._user:
            raise BrokerAccessError(f"user id {message.user_id!r} is not {self._user!r}")
