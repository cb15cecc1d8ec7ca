"""Getting, settling, dead-lettering and bounds on every `Broker`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from shared.broker.protocol import (
    OutMessage,
    PublishOutcome,
    Settlement,
)
from shared.contracts.errors import QueueNotFoundError
from tests.brokers import BrokerRig, eventually
from tests.contract.broker.broker_steps import (
    CLASSIC,
    DEAD,
    PRIVATE,
    WORK,
    declare,
    declare_dead,
    publish,
    take,
    take_bodies,
    wait_ready,
)


async def test_get_returns_none_on_an_empty_queue_and_fails_on_a_missing_one(
    broker_rig: BrokerRig,
):
    broker = await broker_rig.connect()
    await declare(broker, WORK)

    assert await broker.get("work") is None
    with pytest.raises(QueueNotFoundError):
        await broker.get("missing")


async def test_get_from_a_missing_queue_does_not_affect_other_deliveries(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", "a", "b")
    held = await take(broker, "work")

    with pytest.raises(QueueNotFoundError):
        await broker.get("missing")
    assert await held.settle(Settlement.ACK) is True
    assert await take_bodies(broker, "work", 1) == ["b"]
    await wait_ready(broker, "work", 0)


async def test_get_from_a_queue_deleted_elsewhere_affects_no_other_queue(broker_rig: BrokerRig):
    broker, other = await broker_rig.connect(), await broker_rig.connect("other")
    second = replace(WORK, name="second")
    await declare(broker, WORK, second)
    await publish(broker, "work", "a")
    await publish(broker, "second", "b")
    first = await take(broker, "work")
    await take(broker, "second")
    await other.delete_queue("second")

    with pytest.raises(QueueNotFoundError):
        await broker.get("second")
    assert await first.settle(Settlement.ACK) is True


async def test_concurrent_gets_return_different_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *(str(n) for n in range(12)))

    got = await asyncio.gather(*(broker.get("work") for _ in range(12)))

    assert {str(n) for n in range(12)} == {each.body.decode() for each in got if each is not None}


async def test_a_cancelled_get_loses_no_message_and_affects_no_delivery(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", "a", "b")
    held = await take(broker, "work")
    getting = asyncio.ensure_future(broker.get("work"))
    await asyncio.sleep(0)
    getting.cancel()
    await asyncio.wait([getting])

    assert await take_bodies(broker, "work", 1) == ["b"]
    assert await held.settle(Settlement.ACK) is True
    await wait_ready(broker, "work", 0)


async def test_requeued_messages_come_first_in_the_order_of_return(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *"abcd")
    first, second, third = [await take(broker, "work") for _ in range(3)]
    for delivery in (first, second, third):
        await delivery.settle(Settlement.REQUEUE)
    await wait_ready(broker, "work", 4)

    assert list("abcd") == await take_bodies(broker, "work", 4)


async def test_a_classic_queue_requeues_messages_at_their_old_position(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, CLASSIC)
    await publish(broker, "classic", *"abcd")
    deliveries = [await take(broker, "classic") for _ in range(3)]
    for delivery in reversed(deliveries):
        await delivery.settle(Settlement.REQUEUE)
    await wait_ready(broker, "classic", 4)

    assert list("abcd") == await take_bodies(broker, "classic", 4)


async def test_each_requeue_increases_the_delivery_count(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", "a")
    seen = []
    for _ in range(3):
        delivery = await take(broker, "work")
        seen.append((delivery.redelivered, delivery.delivery_count))
        await delivery.settle(Settlement.REQUEUE)

    assert seen == [(False, 0), (True, 1), (True, 2)]


async def test_a_delivery_is_settled_once(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", "a")
    delivery = await take(broker, "work")

    assert [
        await delivery.settle(Settlement.ACK),
        await delivery.settle(Settlement.REQUEUE),
    ] == [True, True]
    assert await broker.get("work") is None


async def test_rejected_messages_are_dead_lettered_with_the_reason(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await declare_dead(broker)
    await broker.publish("x", "work", OutMessage(body=b"a", message_id="id", headers={"own": 1}))
    await (await take(broker, "work")).settle(Settlement.REJECT)

    dead = await take(broker, DEAD.name)

    assert (dead.body, dead.message_id, dead.routing_key) == (b"a", "id", "work")
    assert {
        "own": 1,
        "x-first-death-reason": "rejected",
        "x-first-death-queue": "work",
        "x-first-death-exchange": "x",
    }.items() <= dead.headers.items()


async def test_a_limit_of_n_allows_n_plus_one_deliveries(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, replace(WORK, delivery_limit=2))
    await declare_dead(broker)
    await publish(broker, "work", "a")
    for count in range(3):
        delivery = await take(broker, "work")
        assert count == delivery.delivery_count
        await delivery.settle(Settlement.REQUEUE)

    dead = await take(broker, DEAD.name)

    assert dead.headers["x-first-death-reason"] == "delivery_limit"
    assert await broker.get("work") is None


async def test_a_dead_letter_routing_key_replaces_the_original(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(
        broker,
        CLASSIC,
        replace(WORK, dead_letter_exchange="x", dead_letter_routing_key="classic"),
    )
    await publish(broker, "work", "a")
    await (await take(broker, "work")).settle(Settlement.REJECT)

    assert (await take(broker, "classic")).routing_key == "classic"


async def test_a_rejected_message_without_a_dead_letter_exchange_is_dropped(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, CLASSIC)
    await publish(broker, "classic", "a", "b")
    await (await take(broker, "classic")).settle(Settlement.REJECT)

    assert await take_bodies(broker, "classic", 1) == ["b"]
    assert await broker.get("classic") is None


async def test_holders_of_quorum_messages_count_as_consumers(broker_rig: BrokerRig):
    broker, other = await broker_rig.connect(), await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", "a", "b", "c")
    held = [await take(broker, "work") for _ in range(3)]

    async def counted() -> tuple[int, bool]:
        depth = await other.depth("work")
        assert depth is not None
        return depth.ready, depth.consumers > 0

    # A busy RabbitMQ answers (0, False) at times, when a queue does not report in time.
    await eventually(lambda: _is(counted, (0, True)))
    await held[0].settle(Settlement.ACK)
    await held[1].settle(Settlement.REQUEUE)
    await eventually(lambda: _is(counted, (1, True)))
    await held[2].settle(Settlement.ACK)
    await eventually(lambda: _is(counted, (1, False)))


async def _is(give: Callable[[], Awaitable[object]], expected: object) -> bool:
    return expected == await give()


async def test_a_full_queue_refuses_messages_and_does_not_count_unsettled_ones(
    broker_rig: BrokerRig,
):
    broker = await broker_rig.connect()
    await declare(broker, replace(CLASSIC, max_length=2))
    await publish(broker, "classic", "a")
    await take(broker, "classic")
    yes, no = PublishOutcome.CONFIRMED, PublishOutcome.REFUSED

    assert [yes, yes, no] == await publish(broker, "classic", "b", "c", "d")
    assert await take_bodies(broker, "classic", 2) == ["b", "c"]


async def test_a_queue_at_its_byte_limit_refuses_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, replace(CLASSIC, max_length_bytes=100))
    yes, no = PublishOutcome.CONFIRMED, PublishOutcome.REFUSED

    assert [yes, yes, no] == await publish(broker, "classic", "a" * 50, "b" * 50, "c")


async def test_a_full_quorum_queue_refuses_messages_eventually(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, replace(WORK, max_length=2))

    outcomes = await publish(broker, "work", *(str(n) for n in range(20)))

    assert outcomes[:2] == [PublishOutcome.CONFIRMED] * 2
    assert PublishOutcome.REFUSED is outcomes[-1]


async def test_overflow_by_drop_head_keeps_the_newest_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, replace(PRIVATE, max_length=1, drop_head=True))

    assert await publish(broker, "private", "a", "b", "c") == [PublishOutcome.CONFIRMED] * 3
    await wait_ready(broker, "private", 1)
    assert await take_bodies(broker, "private", 1) == ["c"]


async def test_messages_dropped_at_the_head_are_dead_lettered(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(
        broker, replace(CLASSIC, max_length=1, drop_head=True, dead_letter_exchange="dead")
    )
    await declare_dead(broker)
    await publish(broker, "classic", "a", "b")

    dead = await take(broker, DEAD.name)

    assert (dead.body, dead.headers["x-first-death-reason"]) == (b"a", "maxlen")
