"""Implementation of `Broker` over RabbitMQ."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Self, cast

from shared.broker.amqp.connection import AmqpConnection
from shared.broker.amqp.getter import AmqpGetter
from shared.broker.amqp.publisher import AmqpPublisher
from shared.broker.amqp.restore import AmqpRestorer
from shared.broker.amqp.subscription import AmqpSubscription
from shared.broker.protocol import (
    BindingSpec,
    Delivery,
    DeliveryHandler,
    ExchangeSpec,
    OutMessage,
    PublishOutcome,
    QueueDepth,
    QueueSpec,
)
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import QueueNotFoundError

_NO_ARGUMENTS: Mapping[str, str] = MappingProxyType({})
_FROM_THE_OLDEST: Mapping[str, str] = MappingProxyType({"x-stream-offset": "first"})


class AmqpBroker:
    """
    RabbitMQ client with two connections: one for publishing, one for everything else.

    Works on asyncio and uvloop. If an exclusive or expiring queue of this client is deleted, the
    client restores the queue and its bindings after a reconnect, or immediately if it consumes the
    queue. It restores bindings to an exchange that was deleted and created again.

    Args:
        url: `amqp://user:password@host/vhost`, or `amqps://`; for several nodes of a broker, a list
            separated by commas.
        client_name: Name of the connections in RabbitMQ's management view.
        heartbeat_s: Heartbeat interval; a connection without traffic for about three intervals is
            closed.
        timeout_s: Maximum time to wait for an answer of the broker, also of each of its nodes.
        reconnect_s: Pause between reconnection attempts.
    """

    def __init__(
        self,
        url: str,
        *,
        client_name: str,
        heartbeat_s: int = 10,
        timeout_s: float = 5.0,
        reconnect_s: float = 1.0,
    ) -> None:
        self._publishing, self._consuming = (
            AmqpConnection(
                url,
                name=f"{client_name} {purpose}",
                heartbeat_s=heartbeat_s,
                timeout_s=timeout_s,
                reconnect_s=reconnect_s,
            )
            for purpose in ("publish", "consume")
        )
        self._publisher = AmqpPublisher(self._publishing)
        self._getter = AmqpGetter(self._consuming)
        self._restorer = AmqpRestorer(
            declare=self._consuming.declare_queue, bind=self._bind, is_up=lambda: self._consuming.up
        )
        self._lost_callbacks: list[Callable[[], None]] = []
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> Self:
        """
        Connect to the broker.

        Raises:
            BrokerUnavailableError: No node of the broker answers within `timeout_s`.
            SettingsError: The broker refuses the login or the virtual host.
        """
        try:
            await self._publishing.connect(on_lost=lambda: None, on_restored=lambda: None)
            await self._consuming.connect(on_lost=self._on_lost, on_restored=self._restorer.wake)
        except BaseException:  # cancelled or failed: undo what was begun and raise again
            await self.close()
            raise
        self._tasks.spawn(self._restorer.run(), name="broker restorer")
        self._tasks.spawn(self._restorer.keep_bindings(), name="broker bindings")
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
        is_up = self._publishing.up and self._consuming.up
        return is_up and self._restorer.complete and self._publisher.is_answered

    @property
    def has_several_nodes(self) -> bool:
        return self._consuming.has_several_nodes

    async def declare_exchange(self, spec: ExchangeSpec) -> None:
        await self._consuming.declare_exchange(spec)

    async def has_exchange(self, name: str) -> bool:
        return await self._consuming.has_exchange(name)

    async def declare_queue(self, spec: QueueSpec) -> None:
        await self._consuming.declare_queue(spec)
        self._restorer.remember_queue(spec)

    async def bind(self, spec: BindingSpec) -> None:
        await self._bind(spec)
        self._restorer.remember_binding(spec)

    async def _bind(self, spec: BindingSpec) -> None:
        async with self._consuming.calling(f"bind {spec.queue}") as channel:
            await channel.queue_bind(spec.queue, spec.exchange, spec.routing_key)

    async def unbind(self, spec: BindingSpec) -> None:
        self._restorer.forget_binding(spec)
        async with self._consuming.calling(f"unbind {spec.queue}") as channel:
            await channel.queue_unbind(spec.queue, spec.exchange, spec.routing_key)

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        return await self._publisher.publish(exchange, routing_key, message)

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        await self._publisher.send(exchange, routing_key, message)

    async def flush_sent(self) -> None:
        await self._publisher.flush_sent()

    async def get(self, queue: str) -> Delivery | None:
        return await self._getter.get(queue)

    async def consume(
        self,
        queue: str,
        handler: DeliveryHandler,
        *,
        prefetch: int,
        gathers_acks: bool = False,
        on_broken: Callable[[], None] = lambda: None,
    ) -> AmqpSubscription:
        return await self._subscribe(
            queue, handler, prefetch=prefetch, gathers_acks=gathers_acks, on_broken=on_broken
        )

    async def read(
        self, stream: str, handler: DeliveryHandler, *, prefetch: int
    ) -> AmqpSubscription:
        return await self._subscribe(
            stream, handler, prefetch=prefetch, gathers_acks=True, arguments=_FROM_THE_OLDEST
        )

    async def _subscribe(
        self,
        queue: str,
        handler: DeliveryHandler,
        *,
        prefetch: int,
        gathers_acks: bool,
        on_broken: Callable[[], None] = lambda: None,
        arguments: Mapping[str, str] = _NO_ARGUMENTS,
    ) -> AmqpSubscription:
        def broken() -> None:
            self._restorer.wake()
            on_broken()

        subscription = AmqpSubscription(
            self._consuming,
            queue=queue,
            handler=handler,
            prefetch=prefetch,
            gathers_acks=gathers_acks,
            arguments=arguments,
            on_broken=broken,
            on_cancelled=self._restorer.subscriptions.discard,
        )
        await subscription.start()
        self._restorer.subscriptions.add(subscription)
        return subscription

    async def depth(self, queue: str) -> QueueDepth | None:
        try:
            async with self._consuming.calling(f"depth of {queue}") as channel:
                answer = await channel.queue_declare(queue, passive=True)
        except QueueNotFoundError:
            return None
        return QueueDepth(ready=answer.message_count or 0, consumers=answer.consumer_count or 0)

    async def purge(self, queue: str) -> int:
        async with self._consuming.calling(f"purge {queue}") as channel:
            answer = await channel.queue_purge(queue)
        return cast("int", answer.message_count)

    async def delete_queue(self, queue: str) -> None:
        self._restorer.forget_queue(queue)
        async with self._consuming.calling(f"delete {queue}") as channel:
            await channel.queue_delete(queue)

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        self._lost_callbacks.append(callback)

    async def close(self) -> None:
        """Close the client; idempotent. Unsettled deliveries return to their queues, in order."""
        await self._tasks.cancel()
        await self._restorer.close()
        await self._getter.close()
        await asyncio.gather(self._publishing.close(), self._consuming.close())

    def _on_lost(self) -> None:
        self._restorer.lost()
        for callback in self._lost_callbacks:
            callback()
