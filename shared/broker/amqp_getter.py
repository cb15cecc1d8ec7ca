"""`basic.get`, several at a time, without harm to what was got before."""

import asyncio
from dataclasses import dataclass, field

from aiormq import spec

from shared.broker.amqp_connection import AmqpConnection
from shared.broker.amqp_delivery import AmqpDelivery, DeliveryChannel
from shared.broker.amqp_errors import amqp_errors
from shared.broker.protocol import Settlement
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import BrokerUnavailableError, QueueNotFoundError

MAX_GETS_PER_QUEUE = 4
MAX_QUEUES = 256
"""That have channels of their own, so that half of the 2047 suffice that RabbitMQ allows."""


@dataclass(slots=True)
class _QueueChannels:
    """
    Channels of one queue, shared with no other.

    A get from a queue that has gone closes the channel and requeues everything unacknowledged
    on it. Here that is only what came from the same, deleted queue.
    """

    idle: list[DeliveryChannel] = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_GETS_PER_QUEUE))
    num_asking: int = 0


class AmqpGetter:
    """
    Takes single messages.

    Args:
        connection: The consuming one.
        timeout_s: Longest wait for the broker's answer.
    """

    def __init__(self, connection: AmqpConnection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._queues: dict[str, _QueueChannels] = {}
        """The one asked last is the last."""
        self._tasks = OwnedTasks()

    async def get(self, queue: str) -> AmqpDelivery | None:
        """
        The first ready message; None when there is none.

        Raises:
            QueueNotFoundError: No such queue.
            BrokerUnavailableError: No answer.
        """
        # The call runs in a task of its own: aiormq closes a channel whose call is cancelled,
        # which would requeue every other delivery of that channel.
        task = self._tasks.spawn(self._fetch(queue), name=f"get {queue}")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            task.add_done_callback(self._hand_back)
            raise BrokerUnavailableError(f"get {queue}: no answer") from error
        except asyncio.CancelledError:
            task.add_done_callback(self._hand_back)
            raise

    async def close(self) -> None:
        for channels in self._queues.values():
            for channel in channels.idle:
                channel.abandon()
        await self._tasks.cancel()

    async def _fetch(self, queue: str) -> AmqpDelivery | None:
        channels = self._of(queue)
        channels.num_asking += 1
        try:
            async with channels.slots:
                return await self._ask(queue, channels)
        finally:
            channels.num_asking -= 1

    async def _ask(self, queue: str, channels: _QueueChannels) -> AmqpDelivery | None:
        channel = await self._channel(channels)
        try:
            with amqp_errors(f"get {queue}"):
                message = await channel.raw.basic_get(queue)
        except QueueNotFoundError:
            if self._queues.get(queue) is channels:
                del self._queues[queue]
            for other in channels.idle:
                await other.retire()
            raise
        channels.idle.append(channel)
        if isinstance(message.delivery, spec.Basic.GetEmpty):
            return None
        return channel.deliver(message, queue)

    def _of(self, queue: str) -> _QueueChannels:
        """The queue's channels; who was asked longest ago makes room for a new one."""
        channels = self._queues.pop(queue, None)
        if channels is None:
            channels = _QueueChannels()
            if len(self._queues) >= MAX_QUEUES:
                self._retire_oldest()
        self._queues[queue] = channels
        return channels

    def _retire_oldest(self) -> None:
        quiet = (name for name, each in self._queues.items() if not each.num_asking)
        if (oldest := next(quiet, None)) is not None:
            for channel in self._queues.pop(oldest).idle:
                self._tasks.spawn(channel.retire(), name=f"retire a channel of {oldest}")

    async def _channel(self, channels: _QueueChannels) -> DeliveryChannel:
        while channels.idle:
            channel = channels.idle.pop()
            if not channel.gone:
                return channel
        return DeliveryChannel(await self._connection.open_channel())

    def _hand_back(self, task: asyncio.Task[AmqpDelivery | None]) -> None:
        """Requeue what arrives for a caller who no longer waits."""
        if task.cancelled() or task.exception() is not None:
            return
        delivery = task.result()
        if delivery is not None:
            self._tasks.spawn(
                delivery.settle(Settlement.REQUEUE), name=f"hand back {task.get_name()}"
            )
