"""Closed and lost connections on every `Broker`."""

import pytest

from shared.broker.protocol import (
    OutMessage,
    Settlement,
)
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
)
from tests.brokers import BrokerRig, eventually
from tests.contract.broker.broker_steps import (
    PRIVATE,
    WORK,
    Recorder,
    declare,
    publish,
    take,
    take_bodies,
    wait_ready,
)


async def test_closing_a_client_requeues_its_deliveries_in_order(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *"abc")
    async with broker_rig.open("leaver") as leaver:
        held = [await take(leaver, "work"), await take(leaver, "work")]
    await wait_ready(broker, "work", 3)

    assert all(each.has_returned() for each in held)
    assert [await each.settle(Settlement.ACK) for each in held] == [False, False]
    again = [await take(broker, "work") for _ in range(3)]
    assert [(each.body.decode(), each.redelivered, each.delivery_count) for each in again] == [
        ("a", True, 1),
        ("b", True, 1),
        ("c", False, 0),
    ]


async def test_a_lost_connection_makes_deliveries_stale_and_requeues_them(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    losses: list[None] = []
    broker.on_connection_lost(lambda: losses.append(None))
    await declare(broker, WORK)
    await publish(broker, "work", *"abc")
    held = [await take(broker, "work"), await take(broker, "work")]
    before = [each.has_returned() for each in held]
    await broker_rig.drop(broker)

    assert losses == [None]
    assert (before, [each.has_returned() for each in held]) == ([False] * 2, [True] * 2)
    assert [await each.settle(Settlement.ACK) for each in held] == [False, False]
    assert list("abc") == await take_bodies(broker, "work", 3)


async def test_a_lost_connection_restores_exclusive_queue_binding_and_subscription(
    broker_rig: BrokerRig,
):
    broker, other = await broker_rig.connect(), await broker_rig.connect("other")
    await declare(broker, PRIVATE)
    recorder = Recorder()
    await broker.consume("private", recorder, prefetch=10)
    await publish(other, "private", "before")
    await recorder.wait(1)
    await broker_rig.drop(broker)
    await publish(other, "private", "after")
    await recorder.wait(2)

    assert recorder.bodies == ["before", "after"]
    assert [each.has_returned() for each in recorder.deliveries] == [True, False]
    assert [await each.settle(Settlement.ACK) for each in recorder.deliveries] == [False, True]


async def test_an_exclusive_queue_is_locked_and_deleted_with_its_owner(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    async with broker_rig.open("owner") as owner:
        await declare(owner, PRIVATE)
        for operation in (
            broker.declare_queue(PRIVATE),
            broker.depth("private"),
            broker.get("private"),
        ):
            with pytest.raises(BrokerConflictError):
                await operation

    async def gone() -> bool:
        return await broker.depth("private") is None

    await eventually(gone)


async def test_a_closed_client_is_unavailable_and_can_be_closed_again(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    assert broker.connected
    await broker.close()
    await broker.close()

    assert not broker.connected
    for operation in (
        broker.publish("x", "work", OutMessage(body=b"a")),
        broker.send("x", "work", OutMessage(body=b"a")),
        broker.get("work"),
        broker.depth("work"),
    ):
        with pytest.raises(BrokerUnavailableError):
            await operation
