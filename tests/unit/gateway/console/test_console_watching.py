"""The console receives messages only while a browser is open."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway.console.watching import LINGER_S, MeshWatch
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.contracts.base import InstanceId, encode
from shared.contracts.telemetry import LsoExecuted
from tests.brokers import eventually
from tests.clocks import NOW, FakeClock
from tests.deliveries import UnreliableBroker

pytestmark = pytest.mark.virtual_time

EXECUTED = LsoExecuted(instance_id=InstanceId("one"), at=NOW, lso="evict", outcome="done")
UNSEEN_S = 1.0
"""Time in which a state without a viewer could receive a message."""


@pytest.fixture
async def broker() -> AsyncIterator[UnreliableBroker]:
    async with UnreliableBroker(MemoryHub()) as opened:
        await topology.declare(opened)
        yield opened


async def execute(broker: UnreliableBroker) -> None:
    message = OutMessage(body=encode(EXECUTED), kind="lso.executed.v1", persistent=False)
    await broker.send(topology.TELEMETRY, topology.LSO_KEY, message)


async def test_messages_are_received_while_the_state_is_viewed(
    broker: UnreliableBroker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.gateway.console.watching.PLAN_TIMEOUT_S", 0.01)
    monkeypatch.setattr("services.gateway.console.watching.PLAN_PERIOD_S", 0.01)
    monkeypatch.setattr("services.gateway.console.watching.LOOK_PERIOD_S", 0.01)
    clock, stop = FakeClock(), asyncio.Event()
    watch = MeshWatch(broker, clock)
    following = asyncio.create_task(watch.follow(stop))
    await asyncio.sleep(UNSEEN_S)
    await execute(broker)
    await asyncio.sleep(UNSEEN_S)
    assert (watch.since, len(watch.lsos)) == (None, 0)

    with watch.viewed():
        await eventually(lambda: watch.since is not None)
        await execute(broker)
        await eventually(lambda: len(watch.lsos) == 1)
    clock.advance(LINGER_S)
    await eventually(lambda: watch.since is None)
    await execute(broker)
    await asyncio.sleep(UNSEEN_S)
    assert (watch.since, len(watch.lsos)) == (None, 1)

    with watch.viewed():
        await eventually(lambda: watch.since is not None)
        assert len(watch.lsos) == 0
        stop.set()
    await following
