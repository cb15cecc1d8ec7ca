"""Cancellations that the broker keeps, for agents that start and after a lost connection."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.agent.cancels import ABSENT_RETRY_S, Cancels
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, encode
from shared.contracts.control import CancelsMarked, RequestCancel, StoredCancel
from tests.agents.rig import REPLY, AgentRig, R
from tests.brokers import eventually
from tests.queued import a_request

pytestmark = pytest.mark.virtual_time
decode: Decoder[CancelsMarked | RequestCancel | StoredCancel] = Decoder(
    CancelsMarked | RequestCancel | StoredCancel
)


@pytest_asyncio.fixture
async def far() -> AsyncIterator[MemoryBroker]:
    """A client of a broker without any queue."""
    async with MemoryBroker(MemoryHub(), client_name="far") as broker:
        yield broker


class Reader:
    """Reads cancellations as an agent does."""

    def __init__(self, broker: Broker) -> None:
        self.cancels = Cancels(broker)
        self.ids: list[str] = []

    async def on_delivery(self, delivery: Delivery) -> None:
        message = decode(delivery.body)
        if isinstance(message, CancelsMarked):
            self.cancels.on_mark(message.mark)
        else:
            self.ids.append(message.request_id)
        await delivery.settle(Settlement.ACK)


async def cancel(broker: Broker, request_id: str, key: str = topology.CONTROL_CANCEL) -> None:
    message = RequestCancel(request_id=request_id, reply_to=REPLY)
    await broker.publish(topology.CONTROL, key, OutMessage(body=encode(message)))


async def test_all_kept_cancellations_are_known_after_the_start(far: MemoryBroker):
    await topology.declare(far)
    for number in range(1000):
        await cancel(far, f"r{number}")
    await cancel(far, "stored", topology.COMMAND_CANCEL)
    reader = Reader(far)
    await reader.cancels.start(reader.on_delivery)

    assert reader.cancels.known
    assert reader.ids == [*(f"r{number}" for number in range(1000)), "stored"]


async def test_a_broker_without_the_stream_keeps_nothing_until_it_exists(far: MemoryBroker):
    reader = Reader(far)
    await reader.cancels.start(reader.on_delivery)
    assert reader.cancels.known
    following = asyncio.create_task(reader.cancels.follow(reader.on_delivery))
    await topology.declare(far)
    await cancel(far, "r")
    await asyncio.sleep(ABSENT_RETRY_S + 1.0)
    following.cancel()

    assert reader.ids == ["r"]


async def test_after_a_lost_connection_nothing_is_known_until_the_stream_is_read(
    far: MemoryBroker,
):
    await topology.declare(far)
    reader = Reader(far)
    await reader.cancels.start(reader.on_delivery)
    following = asyncio.create_task(reader.cancels.follow(reader.on_delivery))
    await asyncio.sleep(0)
    far.lose_connection()
    assert not reader.cancels.known
    await asyncio.sleep(10.0)
    assert not reader.cancels.known
    far.reconnect()
    await cancel(far, "r")
    await eventually(lambda: reader.cancels.known)
    following.cancel()

    assert reader.ids == ["r"]


async def test_a_request_that_was_cancelled_while_the_agent_was_away_does_not_begin(rig: AgentRig):
    rig.broker.lose_connection()
    await cancel(rig.far, R)
    rig.broker.reconnect()
    await rig.put(a_request("r", reply_to=REPLY))

    assert (await rig.failed()).error.code == "cancelled"
    assert "r" not in rig.engine.running


async def test_an_agent_begins_what_was_not_cancelled_after_it_was_away(rig: AgentRig):
    rig.broker.drop_connection()
    await rig.put(a_request("r", reply_to=REPLY))

    await rig.engine.began("r")
