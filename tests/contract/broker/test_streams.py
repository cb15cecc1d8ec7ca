"""Streams, which keep what was read, on every `Broker`."""

from dataclasses import replace

import pytest

from shared.broker.protocol import Broker, Delivery, OutMessage, QueueSpec, QueueType, Settlement
from shared.contracts.errors import BrokerConflictError, QueueNotFoundError
from tests.brokers import BrokerRig, eventually
from tests.contract.broker.broker_steps import declare, publish

STREAM = QueueSpec(name="stream", type=QueueType.STREAM, max_length_bytes=1 << 20, max_age_s=3600.0)


class Reader:
    """Reads the stream, and keeps the bodies."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.got: list[Delivery] = []

    @property
    def bodies(self) -> str:
        return "".join(delivery.body.decode() for delivery in self.got)

    async def begin(self) -> "Reader":
        self.subscription = await self._broker.read("stream", self._on_delivery, prefetch=2)
        return self

    async def _on_delivery(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        await delivery.settle(Settlement.ACK)

    async def has_read(self, bodies: str) -> None:
        await eventually(lambda: self.bodies == bodies)


async def test_each_reader_gets_what_was_sent_before_and_after_it_began(broker_rig: BrokerRig):
    one, other = await broker_rig.connect(), await broker_rig.connect()
    await declare(one, STREAM)
    await publish(one, "stream", *"abcde")
    first = await Reader(one).begin()
    await first.has_read("abcde")
    second = await Reader(other).begin()
    await second.has_read("abcde")
    await publish(one, "stream", *"fg")

    await first.has_read("abcdefg")
    await second.has_read("abcdefg")


async def test_a_message_of_a_stream_keeps_its_properties(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, STREAM)
    message = OutMessage(
        body=b"\x00body",
        kind="kind.v1",
        message_id="id",
        correlation_id="correlation",
        reply_to="reply.me",
        persistent=False,
        user_id="guest",
        headers={"key": "value"},
    )
    await broker.publish("x", "stream", message)
    reader = await Reader(broker).begin()
    await eventually(lambda: len(reader.got) == 1)
    (got,) = reader.got

    assert (got.body, got.kind, got.queue) == (b"\x00body", "kind.v1", "stream")
    assert (got.message_id, got.correlation_id, got.reply_to, got.user_id) == (
        "id",
        "correlation",
        "reply.me",
        "guest",
    )
    assert (got.routing_key, got.headers["key"]) == ("stream", "value")


async def test_a_reader_begins_again_after_a_lost_connection(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, STREAM)
    await publish(broker, "stream", *"abc")
    reader = await Reader(broker).begin()
    await reader.has_read("abc")
    await broker_rig.drop(broker)
    await reader.has_read("abcabc")
    await publish(broker, "stream", "d")

    await reader.has_read("abcabcd")


async def test_a_cancelled_reader_gets_nothing_more(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, STREAM)
    left, stayed = await Reader(broker).begin(), await Reader(broker).begin()
    await left.subscription.cancel()
    await publish(broker, "stream", *"ab")
    await stayed.has_read("ab")

    assert left.got == []


async def test_an_absent_stream_cannot_be_read(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    with pytest.raises(QueueNotFoundError):
        await Reader(broker).begin()


async def test_the_properties_of_a_stream_cannot_change(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, STREAM)
    await broker.declare_queue(STREAM)

    with pytest.raises(BrokerConflictError):
        await broker.declare_queue(replace(STREAM, max_age_s=60.0))
    with pytest.raises(ValueError, match="max_length_bytes, max_age_s and segment_bytes only"):
        await broker.declare_queue(replace(STREAM, message_ttl_s=1.0))
