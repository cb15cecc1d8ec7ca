"""A consumer that survives its channel."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from aiormq.abc import DeliveredMessage

from shared.broker.amqp_connection import AmqpConnection
from shared.broker.amqp_delivery import AmqpDelivery, DeliveryChannel
from shared.broker.amqp_errors import amqp_errors
from shared.broker.protocol import DeliveryHandler
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import MeshError

log = structlog.get_logger()


class AmqpSubscription:
    """
    `Subscription` on a channel of its own.

    Handlers are tasks of ours: aiormq cancels its own consumer tasks with their channel.

    Args:
        connection: The consuming one.
        queue: Must exist.
        handler: See `Broker.consume`.
        prefetch: Most unsettled deliveries.
        on_broken: The channel has gone or the broker cancelled the consumer.
        on_cancelled: Nobody wants it any more.
        timeout_s: For each round trip.
    """

    def __init__(
        self,
        connection: AmqpConnection,
        *,
        queue: str,
        handler: DeliveryHandler,
        prefetch: int,
        on_broken: Callable[[], None],
        on_cancelled: Callable[["AmqpSubscription"], None],
        timeout_s: float,
    ) -> None:
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.queue = queue
        self._connection = connection
        self._handler = handler
        self._prefetch = prefetch
        self._on_broken = on_broken
        self._on_cancelled = on_cancelled
        self._timeout_s = timeout_s
        self._channel: DeliveryChannel | None = None
        self._tag: str | None = None
        self._ended = False
        self._tasks = OwnedTasks()

    @property
    def running(self) -> bool:
        return self._tag is not None and self._channel is not None and not self._channel.gone

    async def start(self) -> None:
        """
        Begin to consume, or begin again.

        Raises:
            QueueNotFoundError: No such queue.
            BrokerConflictError: It is another connection's.
        """
        if self._channel is not None:
            await self._channel.retire()
        channel = DeliveryChannel(await self._connection.open_channel())
        self._channel, self._tag = channel, None

        async def on_message(message: DeliveredMessage) -> None:
            delivery = channel.deliver(message, self.queue)
            self._tasks.spawn(self._handle(delivery), name=f"handle {self.queue}")

        def on_server_cancel(*_: Any) -> None:
            self._tag = None
            self._break()

        channel.raw.on_consumer_cancel_callbacks.add(on_server_cancel)
        with amqp_errors(f"consume {self.queue}"):
            await channel.raw.basic_qos(prefetch_count=self._prefetch, timeout=self._timeout_s)
            consumed = await channel.raw.basic_consume(
                self.queue, on_message, timeout=self._timeout_s
            )
        self._tag = consumed.consumer_tag
        channel.raw.closing.add_done_callback(lambda _: self._break())

    async def cancel(self) -> None:
        # Shielded: a cancelled call would close the channel under running handlers.
        await asyncio.shield(self._tasks.spawn(self._stop(), name=f"cancel {self.queue}"))
        await self._tasks.wait()
        if self._channel is not None:
            await self._channel.retire()

    async def close(self) -> None:
        """End handlers; the connection is about to be closed."""
        self._ended = True
        if self._channel is not None:
            self._channel.abandon()
        await self._tasks.cancel()

    async def _stop(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._on_cancelled(self)
        if self._channel is not None and self._tag is not None and not self._channel.gone:
            try:
                with amqp_errors(f"cancel {self.queue}"):
                    await self._channel.raw.basic_cancel(self._tag, timeout=self._timeout_s)
            except MeshError as error:
                # The channel has gone, and the consumer with it.
                log.debug("subscription.cancel_failed", queue=self.queue, error=str(error))

    def _break(self) -> None:
        if not self._ended:
            self._on_broken()

    async def _handle(self, delivery: AmqpDelivery) -> None:
        try:
            await self._handler(delivery)
        except Exception:  # a handler that breaks its promise must not stop the others
            log.exception("handler.raised", queue=self.queue, kind=delivery.kind)
