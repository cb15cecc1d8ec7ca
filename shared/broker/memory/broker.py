"""In-process `Broker` for tests and for a mesh in one process."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from shared.broker.memory.hub import MemoryHub
from shared.broker.memory.queue import MemoryQueue
from shared.broker.memory.subscription import MemorySession, MemorySubscription
from shared.broker.protocol import (
    BindingSpec,
    Delivery,
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
)

log = structlog.get_logger()


class MemoryBroker:
    """
    A client of a `MemoryHub`.

    Args:
        hub: The server, shared by all clients.
        client_name: Name of the client in logs.
        user: User of the connection; messages with another user id are refused.
    """

    def __init__(self, hub: MemoryHub, *, client_name: str = "", user: str = "guest") -> None:
        self._hub = hub
        self._client_name = client_name
        self._user = user
        self._session = MemorySession(open=False)
        self._subscriptions: dict[MemorySubscription, MemoryQueue] = {}
        self._lost: tuple[list[QueueSpec], list[BindingSpec]] = [], []
        """Exclusive queues that were deleted with the last session, and their bindings."""
        self._lost_callbacks: list[Callable[[], None]] = []

    async def __aenter__(self) -> Self:
        self._hub.enter(self)
        self._session = MemorySession(open=True)
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
        return self._session.open

    @property
    def has_several_nodes(self) -> bool:
        return False

    @property
    def _server(self) -> MemoryHub:
        """Return the hub; raises an error while the client is not connected."""
        if not self.connected:
            raise BrokerUnavailableError(f"{self._client_name or 'client'} is not connected")
        return self._hub

    async def declare_exchange(self, spec: ExchangeSpec) -> None:
        self._server.declare_exchange(spec)

    async def has_exchange(self, name: str) -> bool:
        return self._server.has_exchange(name)

    async def declare_queue(self, spec: QueueSpec) -> None:
        self._server.declare_queue(spec, self)

    async def bind(self, spec: BindingSpec) -> None:
        self._server.bind(spec, self)

    async def unbind(self, spec: BindingSpec) -> None:
        self._server.unbind(spec)

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        outcome = self._publish(exchange, routing_key, message)
        # A loop of publishes must let consumers run, as it would with a network in between.
        await asyncio.sleep(0)
        return outcome

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        try:
            self._publish(exchange, routing_key, message)
        except BrokerConflictError as error:
            # RabbitMQ reports the failure too late for the sender to notice.
            log.warning("message.rejected", exchange=exchange, error=str(error))
        await asyncio.sleep(0)

    async def flush_sent(self) -> None:
        await asyncio.sleep(0)

    async def get(self, queue: str) -> Delivery | None:
        await asyncio.sleep(0)
        source = self._server.existing(queue, self)
        if source.spec.single_active_consumer and source.spec.type is QueueType.QUORUM:
            raise BrokerConflictError(f"queue {queue!r} has a single active consumer")
        return source.get(self._session)

    async def consume(
        self,
        queue: str,
        handler: DeliveryHandler,
        *,
        prefetch: int,
        gathers_acks: bool = False,  # noqa: ARG002 - acknowledgements cost nothing here
        on_broken: Callable[[], None] = lambda: None,
    ) -> MemorySubscription:
        source = self._server.existing(queue, self)
        subscription = MemorySubscription(
            queue,
            handler,
            prefetch=prefetch,
            on_broken=on_broken,
            on_cancelled=self._forget,
        )
        self._attach(subscription, source)
        return subscription

    async def read(
        self, stream: str, handler: DeliveryHandler, *, prefetch: int
    ) -> MemorySubscription:
        return await self.consume(stream, handler, prefetch=prefetch)

    async def depth(self, queue: str) -> QueueDepth | None:
        found = self._server.find(queue, self)
        return None if found is None else found.depth

    async def purge(self, queue: str) -> int:
        return self._server.existing(queue, self).purge()

    async def delete_queue(self, queue: str) -> None:
        if self._server.find(queue, self) is not None:
            self._hub.delete_queue(queue)

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        self._lost_callbacks.append(callback)

    async def close(self) -> None:
        """Close the client; idempotent. Unsettled deliveries return to their queues, in order."""
        self._hub.leave(self)
        self._end_session()
        for subscription in tuple(self._subscriptions):
            await subscription.close()

    def drop_connection(self) -> None:
        """Lose the connection and reconnect immediately, as after a short network failure."""
        self.lose_connection()
        if self._hub.running:
            self.reconnect()

    def lose_connection(self) -> None:
        """Record that the connection ended; the hub calls this method."""
        if not self._session.open:
            return
        self._end_session()
        for subscription in self._subscriptions:
            subscription.on_broken()
        for callback in self._lost_callbacks:
            callback()

    def reconnect(self) -> None:
        """Reconnect, and restore queues, bindings and subscriptions; the hub calls this method."""
        if self._session.open:
            return
        self._session = MemorySession(open=True)
        queues, bindings = self._lost
        for spec in queues:
            self._hub.declare_queue(spec, self)
        for binding in bindings:
            self._hub.bind(binding, self)
        for subscription in self._subscriptions:
            source = self._hub.find(subscription.queue, self)
            if source is not None and subscription.session is not self._session:
                self._attach(subscription, source)

    def declared(self, queue: str) -> None:
        """Consume again from a queue that was deleted and exists now; the hub calls this method."""
        if not self._session.open:
            return
        for subscription in tuple(self._subscriptions):
            if subscription.queue == queue:
                self._attach(subscription, self._hub.existing(queue, self))

    def _end_session(self) -> None:
        for subscription, source in self._subscriptions.items():
            source.detach(subscription)
        self._lost = self._hub.end(self._session, self)

    def _attach(self, subscription: MemorySubscription, source: MemoryQueue) -> None:
        subscription.session, subscription.unsettled = self._session, 0
        self._subscriptions[subscription] = source
        source.attach(subscription)

    def _forget(self, subscription: MemorySubscription) -> None:
        source = self._subscriptions.pop(subscription, None)
        if source is not None:
            source.detach(subscription)

    def _publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        if message.user_id is not None and message.user_id != self._user:
            raise BrokerAccessError(
                f"user id {message.user_id!r} differs from the connection's user {self._user!r}"
            )
        return self._server.publish(exchange, routing_key, message)
