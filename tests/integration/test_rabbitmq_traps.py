"""Traps of RabbitMQ and its client library that the AMQP broker avoids."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from aiormq.channel import Channel
from aiormq.exceptions import ChannelInvalidStateError

from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.amqp.connection import AmqpConnection
from shared.broker.protocol import (
    Delivery,
    OutMessage,
    PublishOutcome,
    QueueSpec,
    QueueType,
    Settlement,
)
from shared.broker.retry import publish_until_confirmed
from shared.contracts.errors import BrokerUnavailableError, QueueNotFoundError, SettingsError
from tests.brokers import RabbitRig, eventually
from tests.conftest import RABBIT_4, RABBIT_PARAMS
from tests.integration.rabbit_steps import WORK, declare, take

pytestmark = pytest.mark.rabbitmq


@pytest.fixture(params=[*RABBIT_PARAMS, RABBIT_4])
def rabbit_target(request: Any) -> str:
    """Server of `rabbit_url`."""
    return str(request.param)


def channel_of(delivery: Delivery) -> Channel:
    """The library's channel on which *delivery* is settled (white box)."""
    assert isinstance(delivery.settler, partial)
    return delivery.settler.func.__self__.raw


class TestChannels:
    async def test_no_ack_is_sent_on_a_closing_channel_and_the_connection_survives(
        self, rabbit_rig: RabbitRig
    ):
        """An ack after channel.close would make RabbitMQ close the connection with error 504."""
        broker = await rabbit_rig.connect()
        losses: list[None] = []
        broker.on_connection_lost(lambda: losses.append(None))
        await declare(broker, WORK)
        deliveries: list[Delivery] = []

        async def keep(delivery: Delivery) -> None:
            deliveries.append(delivery)

        subscription = await broker.consume("work", keep, prefetch=20)
        for n in range(20):
            await broker.publish("x", "work", OutMessage(body=str(n).encode()))
        await eventually(lambda: len(deliveries) == 20)
        await asyncio.gather(
            subscription.cancel(), *(each.settle(Settlement.ACK) for each in deliveries)
        )

        assert (await broker.purge("work"), losses) == (0, [])

    async def test_unused_queues_keep_no_channels(
        self, rabbit_rig: RabbitRig, monkeypatch: pytest.MonkeyPatch
    ):
        """
        RabbitMQ allows 2047 channels per connection; retired channels' deliveries stay valid.
        """
        monkeypatch.setattr("shared.broker.amqp.getter.MAX_QUEUES", 3)
        opened: list[Channel] = []
        open_channel = AmqpConnection.open_channel

        async def opening(connection: AmqpConnection) -> Channel:
            opened.append(await open_channel(connection))
            return opened[-1]

        broker = await rabbit_rig.connect()
        names = [f"work-{number}" for number in range(10)]
        for name in names:
            await declare(broker, replace(WORK, name=name))
            await broker.publish("x", name, OutMessage(body=name.encode()))
            await broker.publish("x", name, OutMessage(body=b"second"))
        monkeypatch.setattr(AmqpConnection, "open_channel", opening)
        held = [await take(broker, name) for name in names]
        assert len(opened) == 10
        assert all([await each.settle(Settlement.ACK) for each in held])
        await eventually(lambda: sum(not each.is_closed for each in opened) == 3)
        again = [await take(broker, name) for name in names]

        assert [each.body for each in again] == [b"second"] * 10
        assert not any(each.redelivered for each in again)

    async def test_errors_of_declares_and_counts_do_not_affect_deliveries(
        self, rabbit_rig: RabbitRig
    ):
        broker = await rabbit_rig.connect()
        await declare(broker, WORK)
        await broker.publish("x", "work", OutMessage(body=b"a"))
        held = await take(broker, "work")
        for operation in (
            broker.declare_queue(replace(WORK, max_length=5)),
            broker.depth("missing"),
            broker.get("missing"),
            broker.purge("missing"),
            broker.publish("missing", "k", OutMessage(body=b"")),
        ):
            await asyncio.gather(operation, return_exceptions=True)

        assert await held.settle(Settlement.ACK) is True
        assert await broker.get("work") is None

    async def test_a_closed_channel_makes_deliveries_stale_and_consumers_recover(
        self, rabbit_rig: RabbitRig
    ):
        """Close a channel as RabbitMQ does after its consumer timeout."""
        broker = await rabbit_rig.connect()
        await declare(broker, WORK)
        deliveries: list[Delivery] = []

        async def keep(delivery: Delivery) -> None:
            deliveries.append(delivery)

        await broker.consume("work", keep, prefetch=1)
        await broker.publish("x", "work", OutMessage(body=b"a"))
        await eventually(lambda: len(deliveries) == 1)
        # White box: acknowledging an unknown tag is an error that closes the channel.
        await channel_of(deliveries[0]).basic_ack(999)
        await eventually(lambda: len(deliveries) == 2)

        assert [each.redelivered for each in deliveries] == [False, True]
        assert [await each.settle(Settlement.ACK) for each in deliveries] == [False, True]

    async def test_many_missing_queues_do_not_exhaust_channel_numbers(self, rabbit_rig: RabbitRig):
        broker = await rabbit_rig.connect()
        gets = (broker.get(f"missing{n}") for n in range(50))
        refused = await asyncio.gather(*gets, return_exceptions=True)
        assert {type(each) for each in refused} == {QueueNotFoundError}
        await asyncio.gather(*(broker.depth(f"missing{n}") for n in range(50)))

        with pytest.raises(QueueNotFoundError):
            await broker.get("missing")


class TestQueues:
    async def test_expiry_deletes_a_queue_that_holds_messages(self, rabbit_rig: RabbitRig):
        """Work queues have no expiry, because their consumers may be absent for a long time."""
        broker = await rabbit_rig.connect()
        await declare(broker, QueueSpec(name="work", type=QueueType.CLASSIC, expires_s=0.3))
        await broker.publish("x", "work", OutMessage(body=b"a"))

        # A passive declare counts as use, so check rarely; RabbitMQ may be late on a busy machine.
        for _ in range(10):
            await asyncio.sleep(1.5)
            if await broker.depth("work") is None:
                break
        else:
            pytest.fail("the queue should expire after 0.3 s but exists after 1.5 s without use")

    async def test_requeued_messages_stay_in_front_on_every_work_queue(self, rabbit_rig: RabbitRig):
        """RabbitMQ 3.10 puts returned messages at the back of a queue without a delivery limit."""
        broker = await rabbit_rig.connect()
        await topology.declare(broker)
        await topology.declare_work_queue(broker, "lane.1.m.high.0.short")
        for body in (b"a", b"b", b"c"):
            await broker.publish(topology.LANES, "lane.1.m.high.0.short", OutMessage(body=body))
        for _ in range(3):
            await (await take(broker, "lane.1.m.high.0.short")).settle(Settlement.REQUEUE)

        assert (await take(broker, "lane.1.m.high.0.short")).body == b"a"

    async def test_a_poison_message_ends_in_the_dead_letter_queue(self, rabbit_rig: RabbitRig):
        broker = await rabbit_rig.connect()
        await topology.declare(broker)
        await broker.publish(
            topology.REQUESTS, topology.INTERACTIVE_KEY, OutMessage(body=b"poison")
        )
        for _ in range(topology.DELIVERY_LIMIT + 1):
            await (await take(broker, topology.GLOBAL_INTERACTIVE)).settle(Settlement.REQUEUE)

        dead = await take(broker, topology.DEAD_LETTERS)

        assert (dead.body, dead.headers["x-first-death-reason"]) == (b"poison", "delivery_limit")

    async def test_a_consumed_queue_deleted_elsewhere_is_restored(self, rabbit_rig: RabbitRig):
        """
        RabbitMQ cancels the consumer of a deleted queue, but does not close the connection.
        """
        broker, other = await rabbit_rig.connect(), await rabbit_rig.connect()
        await declare(broker, QueueSpec(name="reply", type=QueueType.CLASSIC, expires_s=60.0))
        bodies: list[bytes] = []

        async def handle(delivery: Delivery) -> None:
            bodies.append(delivery.body)
            await delivery.settle(Settlement.ACK)

        await broker.consume("reply", handle, prefetch=1)
        await other.delete_queue("reply")
        await eventually(lambda: not broker.connected)
        await eventually(lambda: broker.connected)
        outcome = await other.publish("x", "reply", OutMessage(body=b"a"))
        await eventually(lambda: bool(bodies))

        assert (outcome, bodies) == (PublishOutcome.CONFIRMED, [b"a"])


class TestOutages:
    async def test_publishing_fails_at_once_during_an_outage_and_works_after_it(
        self, rabbit_rig: RabbitRig
    ):
        broker = await rabbit_rig.connect()
        await declare(broker, WORK)
        proxy = rabbit_rig.proxy(broker)
        proxy.refusing = True
        proxy.drop()
        await eventually(lambda: not broker.connected)
        with pytest.raises(BrokerUnavailableError):
            await broker.publish("x", "work", OutMessage(body=b"lost"))
        publishing = asyncio.ensure_future(
            publish_until_confirmed(broker, "x", "work", OutMessage(body=b"kept"))
        )
        await asyncio.sleep(0.1)
        assert not publishing.done()
        proxy.refusing = False

        assert await publishing is PublishOutcome.CONFIRMED
        assert (await take(broker, "work")).body == b"kept"

    async def test_a_lost_connection_does_not_look_like_cancellation(self, rabbit_rig: RabbitRig):
        """The library sometimes raises CancelledError in tasks that wait for a confirm."""
        broker = await rabbit_rig.connect()
        await declare(broker, WORK)
        publishing = [
            asyncio.ensure_future(
                broker.publish("x", "work", OutMessage(body=b"a", message_id=str(n)))
            )
            for n in range(200)
        ]
        await asyncio.sleep(0.005)
        await rabbit_rig.drop(broker)
        outcomes = await asyncio.gather(*publishing, return_exceptions=True)

        assert [
            each
            for each in outcomes
            if each is not PublishOutcome.CONFIRMED and not isinstance(each, BrokerUnavailableError)
        ] == []

    async def test_a_wrong_password_is_a_settings_error_unlike_an_outage(
        self, rabbit_rig: RabbitRig
    ):
        wrong = rabbit_rig.url.replace("guest:guest", "guest:wrong")
        with pytest.raises(SettingsError):
            await AmqpBroker(wrong, client_name="test").__aenter__()
        with pytest.raises(BrokerUnavailableError):
            await AmqpBroker("amqp://127.0.0.1:1/", client_name="test").__aenter__()

    async def test_the_library_refuses_an_ack_on_a_closed_channel(self, rabbit_rig: RabbitRig):
        """`Delivery.settle` returns False because the library refuses the ack."""
        broker = await rabbit_rig.connect()
        await declare(broker, WORK)
        await broker.publish("x", "work", OutMessage(body=b"a"))
        held = await take(broker, "work")
        raw = channel_of(held)
        await rabbit_rig.drop(broker)

        with pytest.raises(ChannelInvalidStateError):
            await raw.basic_ack(1)
