"""Subscriptions on every `Broker`."""

import asyncio

import pytest

from shared.broker.protocol import (
    Delivery,
    QueueDepth,
    QueueSpec,
    Settlement,
)
from shared.contracts.errors import (
    BrokerConflictError,
    QueueNotFoundError,
)
from tests.brokers import BrokerRig, eventually
from tests.contract.broker.broker_steps import (
    CLASSIC,
    WORK,
    Recorder,
    declare,
    publish,
    take,
    take_bodies,
    wait_ready,
)


async def test_consume_delivers_at_most_prefetch_unsettled(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *"abcd")
    recorder = Recorder()
    await broker.consume("work", recorder, prefetch=2)
    await recorder.wait(2)
    await wait_ready(broker, "work", 2)
    await recorder.deliveries[0].settle(Settlement.ACK)
    await recorder.wait(3)

    assert list("abc") == recorder.bodies


async def test_consumer_with_gathered_acks_gets_further_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *"abcdefghij")
    bodies = []

    async def handle(delivery: Delivery) -> None:
        bodies.append(delivery.body.decode())
        await delivery.settle(Settlement.ACK)

    await broker.consume("work", handle, prefetch=3, gathers_acks=True)
    await eventually(lambda: len(bodies) == 10)

    assert list("abcdefghij") == bodies


async def test_gathered_acks_reach_the_broker_with_the_end_of_their_consumer(
    broker_rig: BrokerRig,
):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *"abcd")
    recorder = Recorder()
    subscription = await broker.consume("work", recorder, prefetch=100, gathers_acks=True)
    await recorder.wait(4)
    for delivery in recorder.deliveries[:2]:
        await delivery.settle(Settlement.ACK)
    await recorder.deliveries[3].settle(Settlement.REQUEUE)
    await eventually(lambda: len(recorder.bodies) == 5)
    await subscription.cancel()
    await recorder.deliveries[2].settle(Settlement.ACK)
    await broker.close()
    other = await broker_rig.connect()
    await wait_ready(other, "work", 1)

    assert await take_bodies(other, "work", 1) == ["d"]


async def test_consumers_take_turns(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    left, right = Recorder(), Recorder()
    await broker.consume("work", left, prefetch=10)
    await broker.consume("work", right, prefetch=10)
    await publish(broker, "work", *"abcdef")
    await eventually(lambda: len(left.bodies) + len(right.bodies) == 6)

    assert (len(left.bodies), len(right.bodies)) == (3, 3)


async def test_consuming_a_missing_queue_is_an_error(broker_rig: BrokerRig):
    broker = await broker_rig.connect()

    with pytest.raises(QueueNotFoundError):
        await broker.consume("missing", Recorder(), prefetch=1)


async def test_a_consumer_of_a_deleted_queue_is_reported(broker_rig: BrokerRig):
    broker, other = await broker_rig.connect(), await broker_rig.connect("other")
    await declare(broker, WORK)
    ends: list[None] = []
    await broker.consume("work", Recorder(), prefetch=1, on_broken=lambda: ends.append(None))
    await other.delete_queue("work")
    await eventually(lambda: bool(ends))


async def test_a_consumer_that_is_cancelled_is_not_reported(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    ends: list[str] = []
    subscriptions = {
        name: await broker.consume(
            "work", Recorder(), prefetch=1, on_broken=lambda name=name: ends.append(name)
        )
        for name in ("cancelled", "kept")
    }
    await subscriptions["cancelled"].cancel()
    await broker.delete_queue("work")
    await eventually(lambda: bool(ends))
    assert set(ends) == {"kept"}


async def test_a_handler_that_raises_does_not_stop_other_handlers(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    seen = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.body)
        await delivery.settle(Settlement.ACK)
        if delivery.body == b"a":
            raise ZeroDivisionError

    await broker.consume("work", handler, prefetch=1)
    await publish(broker, "work", "a", "b")
    await eventually(lambda: seen == [b"a", b"b"])

    await wait_ready(broker, "work", 0)


async def test_cancelling_waits_for_handlers_and_deliveries_can_be_settled(
    broker_rig: BrokerRig,
):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    release, recorder = asyncio.Event(), Recorder()

    async def handler(delivery: Delivery) -> None:
        await recorder(delivery)
        await release.wait()
        if delivery.body == b"a":
            await delivery.settle(Settlement.ACK)

    subscription = await broker.consume("work", handler, prefetch=2)
    await publish(broker, "work", "a", "b")
    await recorder.wait(2)
    cancelling = asyncio.ensure_future(subscription.cancel())
    await publish(broker, "work", "c")
    await wait_ready(broker, "work", 1)
    assert not cancelling.done()
    release.set()
    await cancelling
    assert await recorder.deliveries[1].settle(Settlement.ACK) is True
    assert await take_bodies(broker, "work", 1) == ["c"]
    assert (recorder.bodies, await broker.get("work")) == (["a", "b"], None)


async def test_a_single_active_consumer_that_ends_is_replaced(broker_rig: BrokerRig):
    broker, first_client = await broker_rig.connect(), await broker_rig.connect("first")
    await declare(broker, QueueSpec(name="leader", single_active_consumer=True, delivery_limit=20))
    first, second = Recorder(), Recorder()
    await first_client.consume("leader", first, prefetch=10)
    await broker.consume("leader", second, prefetch=10)
    await publish(broker, "leader", "a", "b")
    await first.wait(2)
    assert second.bodies == []
    await first.deliveries[0].settle(Settlement.ACK)
    await first_client.close()
    await second.wait(1)
    await publish(broker, "leader", "c")
    await second.wait(2)

    assert (first.bodies, second.bodies) == (["a", "b"], ["b", "c"])


async def test_get_is_refused_with_a_single_active_consumer(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, QueueSpec(name="leader", single_active_consumer=True))

    with pytest.raises(BrokerConflictError):
        await broker.get("leader")


async def test_depth_counts_ready_messages_and_consumers(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, CLASSIC)
    await publish(broker, "classic", "a", "b", "c")
    await take(broker, "classic")
    await wait_ready(broker, "classic", 2)
    subscription = await broker.consume("classic", Recorder(), prefetch=1)

    async def depth_is(ready: int, consumers: int) -> bool:
        return await broker.depth("classic") == QueueDepth(ready=ready, consumers=consumers)

    await eventually(lambda: depth_is(1, 1))
    await subscription.cancel()
    await eventually(lambda: depth_is(1, 0))
    assert await broker.depth("missing") is None


async def test_a_consumer_receives_again_when_its_deleted_queue_exists_again(
    broker_rig: BrokerRig,
):
    broker, other = await broker_rig.connect(), await broker_rig.connect()
    await declare(broker, WORK)
    received: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        received.append(delivery.body)
        await delivery.settle(Settlement.ACK)

    broken = asyncio.Event()
    await broker.consume("work", handle, prefetch=2, on_broken=broken.set)
    await other.delete_queue("work")
    await broken.wait()
    await declare(other, WORK)
    await publish(other, "work", "a", "b")
    await eventually(lambda: set(received) == {b"a", b"b"})
