"""Queues and messages with a limited lifetime, on every `Broker`."""

import asyncio
from dataclasses import replace

import pytest

from shared.broker.protocol import OutMessage, QueueSpec, Settlement
from shared.contracts.errors import BrokerConflictError
from tests.brokers import BrokerRig
from tests.contract.broker.broker_steps import (
    DEAD,
    WORK,
    declare,
    declare_dead,
    publish,
    take,
    take_bodies,
    wait_ready,
)

DELAY = QueueSpec(
    name="delay",
    delivery_limit=20,
    dead_letter_exchange="x",
    dead_letter_routing_key="work",
    message_ttl_s=0.2,
)


async def test_queue_gives_its_messages_away_in_order_after_its_time(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK, DELAY)
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    await publish(broker, "delay", *"abc")
    await wait_ready(broker, "delay", 3)

    assert list("abc") == await take_bodies(broker, "work", 3)
    assert loop.time() - begun_at >= 0.2
    await wait_ready(broker, "delay", 0)


async def test_message_keeps_its_properties_and_names_its_death(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK, DELAY)
    message = OutMessage(
        body=b"body", kind="kind.v1", message_id="id", reply_to="me", headers={"key": "value"}
    )
    await broker.publish("x", "delay", message)
    got = await take(broker, "work")

    assert (got.body, got.kind, got.message_id, got.reply_to) == (b"body", "kind.v1", "id", "me")
    assert got.headers["key"] == "value"
    assert got.headers["x-first-death-reason"] == "expired"
    assert got.headers["x-first-death-queue"] == "delay"
    assert got.queue == "work"


async def test_message_that_a_consumer_holds_outlives_its_time(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK, DELAY)
    await publish(broker, "delay", "a")
    held = await take(broker, "delay")
    await publish(broker, "delay", "b")

    assert await take_bodies(broker, "work", 1) == ["b"]
    await held.settle(Settlement.REQUEUE)
    assert await take_bodies(broker, "work", 1) == ["a"]


async def test_lifetime_of_a_message_arrives_with_it(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await broker.publish("x", "work", OutMessage(body=b"a", expiration_s=60.0015))
    await broker.publish("x", "work", OutMessage(body=b"b"))

    first, second = await take(broker, "work"), await take(broker, "work")
    assert first.expiration_s == pytest.approx(60.0015, abs=0.001)
    assert second.expiration_s is None


async def test_dead_letter_has_no_lifetime(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await declare_dead(broker)
    await broker.publish("x", "work", OutMessage(body=b"a", expiration_s=60.0))
    await (await take(broker, "work")).settle(Settlement.REJECT)

    assert (await take(broker, DEAD.name)).expiration_s is None


async def test_declaring_a_queue_with_another_time_is_a_conflict(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK, DELAY)
    with pytest.raises(BrokerConflictError):
        await broker.declare_queue(replace(DELAY, message_ttl_s=0.3))
