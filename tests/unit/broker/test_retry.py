"""Publishing during outages of an in-process broker."""

import asyncio
from itertools import islice

import pytest

from ops.sim.virtual_time import stall
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec, QueueType
from shared.broker.retry import Backoff, publish_until_confirmed, publish_until_routed
from shared.contracts.errors import BrokerConflictError, BrokerUnavailableError
from shared.runtime.stall_detector import STALL_S

pytestmark = pytest.mark.virtual_time

QUICK = Backoff(first_s=0.001, max_s=0.002)


@pytest.fixture
async def hub():
    return MemoryHub()


@pytest.fixture
async def broker(hub: MemoryHub):
    async with MemoryBroker(hub) as broker:
        await broker.declare_queue(QueueSpec(name="q", type=QueueType.CLASSIC, max_length=1))
        yield broker


async def test_publishing_continues_when_the_broker_returns(hub: MemoryHub, broker: MemoryBroker):
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


async def test_the_time_limit_ends_publishing(hub: MemoryHub, broker: MemoryBroker):
    hub.stop()

    with pytest.raises(BrokerUnavailableError):
        await publish_until_confirmed(
            broker, "", "q", OutMessage(body=b"a"), give_up_after_s=0.0, backoff=QUICK
        )


async def test_publish_is_not_repeated_after_an_answer_of_the_broker(broker: MemoryBroker):
    message = OutMessage(body=b"a")

    assert await publish_until_confirmed(broker, "", "q", message) is PublishOutcome.CONFIRMED
    assert await publish_until_confirmed(broker, "", "q", message) is PublishOutcome.REFUSED
    assert await publish_until_confirmed(broker, "", "none", message) is PublishOutcome.UNROUTABLE
    with pytest.raises(BrokerConflictError):
        await publish_until_confirmed(broker, "none", "q", message)


class Unconfirmed(MemoryBroker):
    """A broker that loses the first confirms, each after a wait and a stall."""

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
        stall(self._stall_s)
        raise BrokerUnavailableError("no confirm in time")


async def test_stalls_of_the_process_do_not_count_towards_the_time_limit(hub: MemoryHub):
    async with Unconfirmed(hub, times=1, wait_s=0.0, stall_s=STALL_S + 0.1) as broker:
        await broker.declare_queue(QueueSpec(name="twice", type=QueueType.CLASSIC))

        outcome = await publish_until_confirmed(
            broker, "", "twice", OutMessage(body=b"a"), give_up_after_s=0.5, backoff=QUICK
        )

        copies = [await broker.get("twice"), await broker.get("twice")]
    assert outcome is PublishOutcome.CONFIRMED
    assert [copy and copy.message_id for copy in copies] == broker.tried
    assert len(set(broker.tried)) == 1


async def test_silence_of_the_broker_counts_towards_the_time_limit(hub: MemoryHub):
    async with Unconfirmed(hub, times=9, wait_s=STALL_S + 0.5, stall_s=0.0) as broker:
        await broker.declare_queue(QueueSpec(name="once", type=QueueType.CLASSIC))

        with pytest.raises(BrokerUnavailableError):
            await publish_until_confirmed(
                broker, "", "once", OutMessage(body=b"a"), give_up_after_s=0.5, backoff=QUICK
            )

    assert len(broker.tried) == 1


def test_waits_double_up_to_the_ceiling_with_at_most_half_jitter():
    backoff = Backoff(first_s=1.0, max_s=3.0)

    waits = list(islice(backoff.delays(), 40))
    ceilings = [1.0, 2.0] + [3.0] * 38
    assert all(0.5 * most <= wait <= most for wait, most in zip(waits, ceilings, strict=True))
    assert len(set(waits)) > 1


async def test_an_unroutable_message_is_published_again_once_its_queue_is_declared(
    broker: MemoryBroker,
):
    await topology.declare(broker)
    await broker.delete_queue(topology.UNCLAIMED_FINALS)
    await publish_until_routed(
        broker, topology.UNCLAIMED, "reply.gone", OutMessage(body=b"final"), backoff=QUICK
    )

    assert await broker.depth(topology.UNCLAIMED_FINALS) is not None
    delivery = await broker.get(topology.UNCLAIMED_FINALS)
    assert delivery is not None
    assert delivery.body == b"final"


async def test_an_unroutable_message_waits_for_an_operator_without_permission_to_declare(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(_broker: object) -> None:
        raise BrokerConflictError("access refused")

    await topology.declare(broker)
    await broker.delete_queue(topology.UNCLAIMED_FINALS)
    with monkeypatch.context() as patch:
        patch.setattr(topology, "declare", refuse)
        publishing = asyncio.create_task(
            publish_until_routed(
                broker, topology.UNCLAIMED, "reply.gone", OutMessage(body=b"final"), backoff=QUICK
            )
        )
        for _ in range(50):
            await asyncio.sleep(0)
        assert not publishing.done()
    await topology.declare(broker)
    await publishing

    assert await broker.get(topology.UNCLAIMED_FINALS) is not None
