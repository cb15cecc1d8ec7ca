"""Publishes messages, with and without publisher confirms."""

import asyncio
import math
from collections import Counter
from contextlib import suppress

from aiormq import spec
from aiormq.channel import Channel
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)

from shared.broker.amqp.connection import AmqpConnection
from shared.broker.amqp.errors import amqp_errors
from shared.broker.protocol import LARGE_BYTES, OutMessage, PublishOutcome
from shared.contracts.base import Seconds
from shared.contracts.errors import BrokerConflictError, MeshError, QueueNotFoundError

_TRANSIENT, _PERSISTENT = 1, 2
_MOST_LATE = 3
"""Number of confirms in a row that did not come in time, after which the broker counts as away."""


_REPEATS_S: tuple[Seconds, ...] = (0.1, 0.2, 0.4, 0.8)
"""
Pauses before a refused message is published again to a broker of several nodes: for about half a
second after the loss of a node, its queues refuse like full ones until they have new leaders.
"""
_REPLACE_S: Seconds = 0.05
"""Shortest time between two replacements of refused channels; a full queue refuses often."""


class AmqpPublisher:
    """
    Publishes messages on two channels, one with publisher confirms and one without.

    A channel on which a message was refused is replaced: RabbitMQ refuses all further messages of a
    channel that was first used while the queue had no leader, until the lost node is back.

    Args:
        connection: Connection for publishing only; the broker can block it without delaying
            deliveries.
    """

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection
        self._opening = asyncio.Lock()
        self._channels: dict[bool, Channel] = {}
        """
        True -> the channel with publisher confirms, False -> the channel without publisher
        confirms.
        """
        self._users: Counter[Channel] = Counter()
        """Channel with publisher confirms -> number of publishes that wait for its confirm."""
        self._replaced_at: float = -math.inf
        self._in_flight: set[str] = set()
        self._num_late = 0
        """Number of confirms that did not come in time since the last that did."""

    @property
    def is_answered(self) -> bool:
        """False while the broker does not confirm, although the connection is up."""
        return self._num_late < _MOST_LATE

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        """Publish a message with a publisher confirm, as `Broker.publish` specifies."""
        outcome = await self._publish_once(exchange, routing_key, message)
        for pause_s in _REPEATS_S if self._connection.has_several_nodes else ():
            if outcome is not PublishOutcome.REFUSED:
                break
            await asyncio.sleep(pause_s)
            outcome = await self._publish_once(exchange, routing_key, message)
        return outcome

    async def _publish_once(
        self, exchange: str, routing_key: str, message: OutMessage
    ) -> PublishOutcome:
        message_id = message.message_id
        if len(message.body) >= LARGE_BYTES:
            return await self._publish_alone(exchange, routing_key, message)
        # aiormq matches a returned message to its publish by message id alone.
        if message_id is not None and message_id in self._in_flight:
            return await self._publish_alone(exchange, routing_key, message)
        if message_id is not None:
            self._in_flight.add(message_id)
        try:
            with amqp_errors(f"publish to {exchange!r}"):
                channel = await self._channel(confirms=True)
                try:
                    return await self._publish_shared(channel, exchange, routing_key, message)
                except (ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed):
                    pass
            # One forbidden publish fails all concurrent publishes on the channel. Repeated alone,
            # this publish gets its own outcome.
            return await self._publish_alone(exchange, routing_key, message)
        finally:
            if message_id is not None:
                self._in_flight.discard(message_id)

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        """Publish a message without a publisher confirm, as `Broker.send` specifies."""
        if len(message.body) >= LARGE_BYTES:
            # Only with a confirm is it known whether the broker refuses the size.
            await self._publish_alone(exchange, routing_key, message)
            return
        with amqp_errors(f"send to {exchange!r}"):
            channel = await self._channel(confirms=False)
            await channel.basic_publish(
                message.body,
                exchange=exchange,
                routing_key=routing_key,
                properties=_properties(message),
                wait=False,
            )
            # This call waits until the socket accepts bytes, which bounds the buffer, but not for
            # the broker's answer.
            await self._connection.drain()

    async def flush_sent(self) -> None:
        """Wait for the messages of `send`, as `Broker.flush_sent` specifies."""
        channel = self._channels.get(False)
        if channel is None or channel.is_closed:
            return
        with amqp_errors("wait for sent messages"):
            # The broker handles the methods of a channel in order, so that its answer to any of
            # them follows the messages before.
            await channel.basic_qos(prefetch_count=0, timeout=self._connection.timeout_s)

    async def _publish_shared(
        self, channel: Channel, exchange: str, routing_key: str, message: OutMessage
    ) -> PublishOutcome:
        """Publish on the channel of all; replace the channel if the message is refused."""
        self._users[channel] += 1
        try:
            outcome = await self._publish_on(channel, exchange, routing_key, message)
            if outcome is PublishOutcome.REFUSED and channel is self._channels.get(True):
                await self._replace_channels()
            return outcome
        finally:
            self._users[channel] -= 1
            if not self._users[channel]:
                del self._users[channel]
                if channel is not self._channels.get(True):
                    await self._close(channel)

    async def _replace_channels(self) -> None:
        """Use new channels from now on; the last publish of the present one closes it."""
        now = asyncio.get_running_loop().time()
        if now < self._replaced_at + _REPLACE_S:
            return
        self._replaced_at = now
        del self._channels[True]
        # Nothing confirms that this channel does not have the same trouble.
        sending = self._channels.pop(False, None)
        if sending is not None:
            await self._close(sending)

    async def _close(self, channel: Channel) -> None:
        with suppress(MeshError), amqp_errors("close channel"):
            await channel.close(timeout=self._connection.timeout_s)

    async def _publish_on(
        self, channel: Channel, exchange: str, routing_key: str, message: OutMessage
    ) -> PublishOutcome:
        try:
            await channel.basic_publish(
                message.body,
                exchange=exchange,
                routing_key=routing_key,
                properties=_properties(message),
                mandatory=True,
                timeout=self._connection.timeout_s,
                wait=False,
            )
        except PublishError:
            outcome = PublishOutcome.UNROUTABLE
        except DeliveryError:
            outcome = PublishOutcome.REFUSED
        except TimeoutError:
            self._num_late += 1
            raise
        else:
            outcome = PublishOutcome.CONFIRMED
        self._num_late = 0
        return outcome

    async def _publish_alone(
        self, exchange: str, routing_key: str, message: OutMessage
    ) -> PublishOutcome:
        channel = await self._connection.open_channel(confirms=True)
        try:
            with amqp_errors(f"publish to {exchange!r}"):
                return await self._publish_on(channel, exchange, routing_key, message)
        except QueueNotFoundError as error:
            raise BrokerConflictError(f"exchange {exchange!r} does not exist") from error
        finally:
            await self._close(channel)

    async def _channel(self, *, confirms: bool) -> Channel:
        """
        Return the channel with or without publisher confirms; reopen a channel that the broker
        closed.
        """
        channel = self._channels.get(confirms)
        if channel is None or channel.is_closed:
            async with self._opening:
                channel = self._channels.get(confirms)
                if channel is None or channel.is_closed:
                    channel = await self._connection.open_channel(confirms=confirms)
                    self._channels[confirms] = channel
        return channel


def _properties(message: OutMessage) -> spec.Basic.Properties:
    return spec.Basic.Properties(
        content_type="application/json",
        delivery_mode=_PERSISTENT if message.persistent else _TRANSIENT,
        headers=dict(message.headers) or None,
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        message_type=message.kind or None,
        user_id=message.user_id,
        expiration=_milliseconds(message.expiration_s),
    )


def _milliseconds(seconds: float | None) -> str | None:
    """Lifetime of a message in AMQP's form."""
    return None if seconds is None else str(max(0, math.ceil(seconds * 1000)))
