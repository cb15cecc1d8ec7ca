"""Deliveries, and the AMQP channels on which deliveries arrive."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import cast

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from shared.broker.amqp.acks import GatheredAcks
from shared.broker.amqp.connection import CLOSE_TIMEOUT_S
from shared.broker.amqp.errors import amqp_errors
from shared.broker.protocol import Delivery, Settlement
from shared.contracts.errors import MeshError

SETTLE_TIMEOUT_S = 30.0
"""
Time limit for settling a delivery: three heartbeat intervals, after which the connection is closed.
"""


class DeliveryChannel:
    """
    A channel with its number of unsettled deliveries.

    If an acknowledgement follows the close of its channel, RabbitMQ closes the whole connection. A
    channel is therefore closed only after its last delivery is settled.

    Args:
        channel: The channel.
        acks: Gathers acknowledgements; None: each is sent at once.
    """

    def __init__(self, channel: Channel, acks: GatheredAcks | None = None) -> None:
        self.raw = channel
        self.consumer_lost = False
        """True if the broker has cancelled the consumer of the channel."""
        self._acks = acks
        self._sending_acks = asyncio.Lock()
        self._unsettled = 0
        self._retired = False
        self._closed = False

    @property
    def gone(self) -> bool:
        return self._closed or self.raw.is_closed

    def deliver(self, message: DeliveredMessage, queue: str) -> Delivery:
        self._unsettled += 1
        properties = message.header.properties
        headers = properties.headers or {}
        count = headers.get("x-delivery-count")
        return Delivery(
            body=message.body,
            kind=properties.message_type or "",
            queue=queue,
            routing_key=message.routing_key or "",
            message_id=properties.message_id,
            correlation_id=properties.correlation_id,
            reply_to=properties.reply_to,
            user_id=properties.user_id,
            headers=headers,
            expiration_s=_seconds(properties.expiration),
            redelivered=bool(message.redelivered),
            delivery_count=count if isinstance(count, int) else 0,
            settler=partial(self._settle, cast("int", message.delivery_tag)),
            has_returned=lambda: self.gone,
        )

    async def retire(self) -> None:
        """Stop deliveries on the channel; close the channel when its last delivery is settled."""
        self._retired = True
        await self.send_acks()
        await self._close_when_done()

    async def send_acks(self) -> None:
        """Send the acknowledgements that were gathered."""
        acks = self._acks
        if acks is None or self.gone:
            return
        with suppress(MeshError, TimeoutError), amqp_errors("acknowledge"):
            # One sender at a time: an acknowledgement of several may not precede one of those.
            async with asyncio.timeout(SETTLE_TIMEOUT_S), self._sending_acks:
                while (ack := acks.next()) is not None:
                    await self.raw.basic_ack(ack.tag, multiple=ack.multiple, wait=False)
                    acks.sent(ack)

    def abandon(self) -> None:
        """Stop settling deliveries of the channel, since the connection is about to be closed."""
        self._closed = True

    async def _settle(self, tag: int, how: Settlement) -> bool:
        """Settle a delivery; return False if the channel is closed or accepted no bytes in time."""
        acks, sent = self._acks, not self.gone
        if sent and acks is not None and how is Settlement.ACK:
            if acks.add(tag) or self._retired:
                await self.send_acks()
        elif sent:
            sent = await self._settled_now(tag, how)
        self._unsettled -= 1
        if self._retired:
            await self._close_when_done()
        return sent

    async def _settled_now(self, tag: int, how: Settlement) -> bool:
        try:
            with amqp_errors("settle"):
                async with asyncio.timeout(SETTLE_TIMEOUT_S):
                    await self._send(tag, how)
        except MeshError:
            return False
        if self._acks is not None:
            self._acks.settled(tag)
        return True

    async def _send(self, tag: int, how: Settlement) -> None:
        if how is Settlement.ACK:
            await self.raw.basic_ack(tag, wait=False)
            return
        # basic.reject, since RabbitMQ 4.3 and later do not count a requeue by basic.nack as a
        # delivery.
        await self.raw.basic_reject(tag, requeue=how is Settlement.REQUEUE, wait=False)

    async def _close_when_done(self) -> None:
        if self._unsettled == 0 and not self.gone:
            self._closed = True
            with suppress(MeshError), amqp_errors("close channel"):
                await self.raw.close(timeout=CLOSE_TIMEOUT_S)


def _seconds(milliseconds: object) -> float | None:
    """Lifetime of a message, which AMQP has as text in milliseconds."""
    text = str(milliseconds)
    return int(text) / 1000 if text.isdecimal() else None
