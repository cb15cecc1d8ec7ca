"""Concurrent `basic.get` calls; a failed call does not affect earlier deliveries."""

import asyncio
from dataclasses import dataclass, field

from aiormq import spec

from shared.broker.amqp.connection import AmqpConnection
from shared.broker.amqp.delivery import DeliveryChannel
from shared.broker.amqp.errors import amqp_errors
from shared.broker.protocol import Delivery, Settlement
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import BrokerUnavailableError, QueueNotFoundError

MAX_GETS_PER_QUEUE = 4
MAX_QUEUES = 256
"""
Maximum number of queues with channels of their own.

At four channels per queue they use about half of the 2047 channels that RabbitMQ allows.
"""


@dataclass(slots=True)
class _QueueChannels:
    """
    Channels that only one queue uses.

    A get from a deleted queue closes the channel, and the broker requeues all unacknowledged
    messages on it. With separate channels these are only messages of the deleted queue.
    """

    idle: list[DeliveryChannel] = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_GETS_PER_QUEUE))
    num_pending: int = 0


class AmqpGetter:
    """
    Gets single messages from queues by `basic.get`.

    Args:
        connection: Connection that receives deliveries.
    """

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection
        self._queues: dict[str, _QueueChannels] = {}
        """Queue name -> channels; the least recently used queue is first."""
        self._tasks = OwnedTasks()

    async def get(self, queue: str) -> Delivery | None:
        """
        Return the queue's first ready message; None if the queue is empty.

        Raises:
            QueueNotFoundError: The queue does not exist.
            BrokerUnavailableError: The broker does not answer.
        """
        try:
            async with asyncio.timeout(self._connection.timeout_s):
                return await self._get(queue, self._of(queue))
        except TimeoutError as error:
            raise BrokerUnavailableError(f"the broker did not answer a get from {queue}") from error

    async def close(self) -> None:
        for channels in self._queues.values():
            for channel in channels.idle:
                channel.abandon()
        await self._tasks.cancel()

    async def _get(self, queue: str, channels: _QueueChannels) -> Delivery | None:
        channels.num_pending += 1
        try:
            # A call that still waits here ends with its caller: when a slow broker answers again,
            # it would get a message without a receiver, and each requeue of a message counts.
            await channels.slots.acquire()
        except asyncio.CancelledError:  # the broker was not asked
            channels.num_pending -= 1
            raise
        # The call runs in a separate task: aiormq closes a channel whose call is cancelled, which
        # would requeue every other delivery of that channel.
        task = self._tasks.spawn(self._fetch(queue, channels), name=f"get {queue}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._hand_back)
            raise

    async def _fetch(self, queue: str, channels: _QueueChannels) -> Delivery | None:
        """Get a message in a slot that was acquired."""
        try:
            return await self._ask(queue, channels)
        finally:
            channels.slots.release()
            channels.num_pending -= 1

    async def _ask(self, queue: str, channels: _QueueChannels) -> Delivery | None:
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
        """Return the channels of a queue; a new queue replaces the least recently used queue."""
        channels = self._queues.pop(queue, None)
        if channels is None:
            channels = _QueueChannels()
            if len(self._queues) >= MAX_QUEUES:
                self._retire_oldest()
        self._queues[queue] = channels
        return channels

    def _retire_oldest(self) -> None:
        quiet = (name for name, each in self._queues.items() if not each.num_pending)
        if (oldest := next(quiet, None)) is not None:
            for channel in self._queues.pop(oldest).idle:
                self._tasks.spawn(channel.retire(), name=f"retire a channel of queue {oldest}")

    async def _channel(self, channels: _QueueChannels) -> DeliveryChannel:
        while channels.idle:
            channel = channels.idle.pop()
            if not channel.gone:
                return channel
        return DeliveryChannel(await self._connection.open_channel())

    def _hand_back(self, task: asyncio.Task[Delivery | None]) -> None:
        """Requeue a message that arrives after its caller has stopped waiting."""
        if task.cancelled() or task.exception() is not None:
            return
        delivery = task.result()
        if delivery is not None:
            self._tasks.spawn(
                delivery.settle(Settlement.REQUEUE), name=f"hand back {task.get_name()}"
            )
