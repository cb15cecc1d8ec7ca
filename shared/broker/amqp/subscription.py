"""A consumer that continues on a new channel when its channel is closed."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiormq.abc import DeliveredMessage
from pamqp.common import FieldValue

from shared.broker.amqp.acks import MOST_DELAY_S, GatheredAcks
from shared.broker.amqp.connection import AmqpConnection
from shared.broker.amqp.delivery import DeliveryChannel
from shared.broker.amqp.errors import amqp_errors
from shared.broker.protocol import DeliveryHandler
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import MeshError
from shared.runtime.events import EventLogger

log = EventLogger(__name__)


class AmqpSubscription:
    """
    `Subscription` with a separate channel.

    Handlers run as tasks of this client, since aiormq cancels its own consumer tasks when their
    channel closes.

    Args:
        connection: Connection that receives deliveries.
        queue: Name of an existing queue.
        handler: See `Broker.consume`.
        prefetch: Maximum number of unsettled deliveries.
        gathers_acks: See `Broker.consume`.
        arguments: Optional arguments of the consumer.
        on_broken: Called when the channel is closed or the broker has cancelled the consumer.
        on_cancelled: Called when the owner has cancelled the subscription.
    """

    def __init__(
        self,
        connection: AmqpConnection,
        *,
        queue: str,
        handler: DeliveryHandler,
        prefetch: int,
        gathers_acks: bool,
        arguments: Mapping[str, str],
        on_broken: Callable[[], None],
        on_cancelled: Callable[["AmqpSubscription"], None],
    ) -> None:
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.queue = queue
        self._connection = connection
        self._handler = handler
        self._prefetch = prefetch
        self._gathers_acks = gathers_acks
        self._arguments: dict[str, FieldValue] = dict(arguments)
        self._on_broken = on_broken
        self._on_cancelled = on_cancelled
        self._channel: DeliveryChannel | None = None
        self._tag: str | None = None
        """Tag of the consumer on the channel; None until the broker has given one."""
        self._turn = asyncio.Lock()
        """Held while the consumer is started or cancelled."""
        self._ended = False
        self._tasks = OwnedTasks()

    @property
    def running(self) -> bool:
        channel = self._channel
        if channel is None or self._tag is None:
            return False
        return not (channel.gone or channel.consumer_lost)

    async def start(self) -> None:
        """
        Start or restart the consumer.

        Raises:
            QueueNotFoundError: The queue does not exist.
            BrokerConflictError: The queue belongs to another connection.
        """
        async with self._turn:
            if not self._ended:
                await self._start()

    async def _start(self) -> None:
        if self._channel is not None:
            await self._channel.retire()
        raw = await self._connection.open_channel()
        acks = None
        if self._gathers_acks:
            acks = GatheredAcks(max(1, self._prefetch // 2), self._send_acks_later)
        channel = DeliveryChannel(raw, acks)
        self._channel, self._tag = channel, None

        async def on_message(message: DeliveredMessage) -> None:
            self._tasks.handle(channel.deliver(message, self.queue), self._handler)

        def on_server_cancel(*_: Any) -> None:
            channel.consumer_lost = True
            self._break()

        channel.raw.on_consumer_cancel_callbacks.add(on_server_cancel)
        with amqp_errors(f"consume {self.queue}"):
            await channel.raw.basic_qos(
                prefetch_count=self._prefetch, timeout=self._connection.timeout_s
            )
            consumed = await channel.raw.basic_consume(
                self.queue,
                on_message,
                arguments=self._arguments,
                timeout=self._connection.timeout_s,
            )
        self._tag = consumed.consumer_tag
        channel.raw.closing.add_done_callback(lambda _: self._break())

    def _send_acks_later(self) -> None:
        """Send the acknowledgements of the present channel after their longest delay."""
        if self._channel is not None:
            loop, channel = asyncio.get_running_loop(), self._channel
            loop.call_later(MOST_DELAY_S, self._send_acks, channel)

    def _send_acks(self, channel: DeliveryChannel) -> None:
        if not channel.gone:
            self._tasks.spawn(channel.send_acks(), name=f"acknowledge {self.queue}")

    async def cancel(self) -> None:
        # Shield `_stop`, since its cancellation would close the channel under running handlers.
        await asyncio.shield(self._tasks.spawn(self._stop(), name=f"cancel {self.queue}"))
        await self._tasks.wait()
        if self._channel is not None:
            await self._channel.retire()

    async def close(self) -> None:
        """Cancel the handlers, before the connection is closed."""
        self._ended = True
        if self._channel is not None:
            await self._channel.send_acks()
            self._channel.abandon()
        await self._tasks.cancel()

    async def _stop(self) -> None:
        async with self._turn:
            await self._cancel_consumer()

    async def _cancel_consumer(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._on_cancelled(self)
        if self._channel is not None and self._tag is not None and not self._channel.gone:
            try:
                with amqp_errors(f"cancel {self.queue}"):
                    await self._channel.raw.basic_cancel(
                        self._tag, timeout=self._connection.timeout_s
                    )
            except MeshError as error:
                # The channel is closed, so the broker has removed the consumer.
                log.debug("subscription.cancel_failed", queue=self.queue, error=str(error))

    def _break(self) -> None:
        if not self._ended:
            self._on_broken()
