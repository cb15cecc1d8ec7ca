"""Deliveries, and the channels they came on."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from shared.broker.amqp_connection import CLOSE_TIMEOUT_S
from shared.broker.amqp_errors import amqp_errors
from shared.broker.protocol import Settlement
from shared.contracts.errors import MeshError

SETTLE_TIMEOUT_S = 30.0
"""Three heartbeats: by then a connection that takes no bytes is given up anyway."""


class DeliveryChannel:
    """
    A channel and how many of its deliveries are unsettled.

    An acknowledgement after the channel's close makes RabbitMQ close the whole connection, so
    a channel is closed only when nothing on it can be settled any more.
    """

    def __init__(self, channel: Channel) -> None:
        self.raw = channel
        self._unsettled = 0
        self._retired = False
        self._closed = False

    @property
    def gone(self) -> bool:
        return self._closed or self.raw.is_closed

    def deliver(self, message: DeliveredMessage, queue: str) -> "AmqpDelivery":
        self._unsettled += 1
        return AmqpDelivery(self, message, queue)

    async def retire(self) -> None:
        """No more deliveries will come: close now, or with the last settlement."""
        self._retired = True
        await self._close_when_done()

    def abandon(self) -> None:
        """The connection is about to be closed: settle nothing more."""
        self._closed = True

    async def settle(self, tag: int, how: Settlement) -> bool:
        """False when the channel is gone, or took no bytes in time."""
        if self.gone:
            self._unsettled -= 1
            return False
        try:
            with amqp_errors("settle"):
                async with asyncio.timeout(SETTLE_TIMEOUT_S):
                    if how is Settlement.ACK:
                        await self.raw.basic_ack(tag, wait=False)
                    else:
                        # Not basic.nack: from 4.3 on that is not counted as a delivery.
                        await self.raw.basic_reject(
                            tag, requeue=how is Settlement.REQUEUE, wait=False
                        )
        except MeshError:
            self._unsettled -= 1
            return False
        self._unsettled -= 1
        if self._retired:
            await self._close_when_done()
        return True

    async def _close_when_done(self) -> None:
        if self._unsettled == 0 and not self.gone:
            self._closed = True
            with suppress(MeshError), amqp_errors("close channel"):
                await self.raw.close(timeout=CLOSE_TIMEOUT_S)


class AmqpDelivery:
    """`Delivery` over AMQP."""

    __slots__ = ("_channel", "_message", "_outcome", "_properties", "_settled", "_tag", "queue")

    def __init__(self, channel: DeliveryChannel, message: DeliveredMessage, queue: str) -> None:
        self._channel = channel
        self._message = message
        self._properties = message.header.properties
        self._tag = cast("int", message.delivery_tag)
        self._settled = False
        self._outcome = True
        self.queue = queue

    @property
    def body(self) -> bytes:
        return self._message.body

    @property
    def kind(self) -> str:
        return self._properties.message_type or ""

    @property
    def routing_key(self) -> str:
        return self._message.routing_key or ""

    @property
    def message_id(self) -> str | None:
        return self._properties.message_id

    @property
    def correlation_id(self) -> str | None:
        return self._properties.correlation_id

    @property
    def reply_to(self) -> str | None:
        return self._properties.reply_to

    @property
    def user_id(self) -> str | None:
        return self._properties.user_id

    @property
    def headers(self) -> Mapping[str, object]:
        return self._properties.headers or {}

    @property
    def redelivered(self) -> bool:
        return bool(self._message.redelivered)

    @property
    def delivery_count(self) -> int:
        count = self.headers.get("x-delivery-count", 0)
        return count if isinstance(count, int) else 0

    async def settle(self, how: Settlement) -> bool:
        if self._settled:
            return self._outcome
        self._settled = True
        try:
            self._outcome = await self._channel.settle(self._tag, how)
        except asyncio.CancelledError:
            # Nothing was sent; a later call may still settle it.
            self._settled = False
            raise
        return self._outcome
