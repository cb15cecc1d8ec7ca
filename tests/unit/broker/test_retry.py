"""Publishing through outages, against an in-process broker that really goes away."""

import asyncio
import time

import pytest

from shared.broker.memory import MemoryBroker
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec, QueueType, Settlement
from shared.broker.retry import Backoff, publish_until_confirmed
from shared.contracts.errors import BrokerConflictError, BrokerUnavailableError
from shared.runtime.attention import STALL_S

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


class Unconfirmed(MemoryBroker):
    """Its confirms get lost the first times, each after a wait, and after standing still."""

    def __init__(self, hub: MemoryHub, *, times: int, wait_s: float, stall_s: float) -> None:
        super().__init__(hub)
        self._left, self._wait_s, self._stall_s = times, wait_s, stall_s
        self.tried: list[str | None] = []

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        outcome = await super().publish(exchange, routing_key, message)
        self.tried.append(message.message_id)
        self._left -= 1
        if self._left < 0:
            return outcome
        await asyncio.sleep(self._wait_s)
        time.sleep(self._stall_s)
        raise BrokerUnavailableError("no confirm in time")


async def test_time_that_the_process_stood_still_does_not_count(hub: MemoryHub):
    async with Unconfirmed(hub, times=1, wait_s=0.0, stall_s=STALL_S + 0.1) as broker:
        await broker.declare_queue(QueueSpec(name="twice", type=QueueType.CLASSIC))

        outcome = await publish_until_confirmed(
            broker, "", "twice", OutMessage(body=b"a"), give_up_after_s=0.5, backoff=QUICK
        )

        copies = [await broker.get("twice"), await broker.get("twice")]
    assert outcome is PublishOutcome.CONFIRMED
    assert [copy and copy.message_id for copy in copies] == broker.tried
    assert len(set(broker.tried)) == 1


async def test_time_that_the_broker_is_silent_for_counts(hub: MemoryHub):
    async with Unconfirmed(hub, times=9, wait_s=STALL_S + 0.5, stall_s=0.0) as broker:
        await broker.declare_queue(QueueSpec(name="once", type=QueueType.CLASSIC))

        with pytest.raises(BrokerUnavailableError):
            await publish_until_confirmed(
                broker, "", "once", OutMessage(body=b"a"), give_up_after_s=0.5, backoff=QUICK
            )

    assert len(broker.tried) == 1


def test_waits_double_up_to_the_ceiling_and_are_shortened_by_at_most_half():
    backoff = Backoff(first_s=1.0, max_s=3.0)

    assert [backoff.delay_s(attempt, 1.0) for attempt in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert backoff.delay_s(1, 0.0) == 1.0
    assert backoff.delay_s(10_000, 1.0) == 3.0
