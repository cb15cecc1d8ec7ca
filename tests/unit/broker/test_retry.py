"""Publishing through outages, against an in-process broker that really goes away."""

import asyncio

import pytest

from shared.broker.memory import MemoryBroker
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec, QueueType, Settlement
from shared.broker.retry import Backoff, publish_until_confirmed
from shared.contracts.errors import BrokerConflictError, BrokerUnavailableError

QUICK = Backoff(first_s=0.001, max_s=0.002)


@pytest.fixture
async def hub():
    return MemoryHub()


@pytest.fixture
async def broker(hub: MemoryHub):
    async with MemoryBroker(hub) as broker:
        await broker.declare_queue(QueueSpec(name="q", type=QueueType.CLASSIC, max_length=1))
        yield broker


async def test_waits_for_the_broker_to_come_back(hub: MemoryHub, broker: MemoryBroker):
    hub.stop()
    publishing = asyncio.ensure_future(
        publish_until_confirmed(broker, "", "q", OutMessage(body=b"a"), backoff=QUICK)
    )
    await asyncio.sleep(0)
    assert not publishing.done()
    hub.start()

    assert await publishing is PublishOutcome.CONFIRMED
    delivery = await broker.get("q")
    assert delivery is not None
    assert (delivery.body, delivery.message_id is None) == (b"a", False)


async def test_gives_up_in_time(hub: MemoryHub, broker: MemoryBroker):
    hub.stop()

    with pytest.raises(BrokerUnavailableError):
        await publish_until_confirmed(
            broker, "", "q", OutMessage(body=b"a"), give_up_after_s=0.0, backoff=QUICK
        )


async def test_answers_are_not_retried(broker: MemoryBroker):
    message = OutMessage(body=b"a")

    assert await publish_until_confirmed(broker, "", "q", message) is PublishOutcome.CONFIRMED
    assert await publish_until_confirmed(broker, "", "q", message) is PublishOutcome.REFUSED
    assert await publish_until_confirmed(broker, "", "none", message) is PublishOutcome.UNROUTABLE
    with pytest.raises(BrokerConflictError):
        await publish_until_confirmed(broker, "none", "q", message)


async def test_a_full_queue_may_be_waited_for(broker: MemoryBroker):
    await broker.publish("", "q", OutMessage(body=b"first"))
    publishing = asyncio.ensure_future(
        publish_until_confirmed(
            broker, "", "q", OutMessage(body=b"second"), retry_refused=True, backoff=QUICK
        )
    )
    await asyncio.sleep(0)
    first = await broker.get("q")
    assert first is not None
    await first.settle(Settlement.ACK)

    assert await publishing is PublishOutcome.CONFIRMED


async def test_waiting_for_a_full_queue_ends_too(broker: MemoryBroker):
    await broker.publish("", "q", OutMessage(body=b"first"))

    outcome = await publish_until_confirmed(
        broker,
        "",
        "q",
        OutMessage(body=b"second"),
        retry_refused=True,
        give_up_after_s=0.0,
        backoff=QUICK,
    )

    assert outcome is PublishOutcome.REFUSED


def test_waits_double_up_to_the_ceiling_and_are_shortened_by_at_most_half():
    backoff = Backoff(first_s=1.0, max_s=3.0)

    assert [backoff.delay_s(attempt, 1.0) for attempt in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert backoff.delay_s(1, 0.0) == 1.0
    assert backoff.delay_s(10_000, 1.0) == 3.0
