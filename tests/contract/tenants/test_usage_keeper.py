"""Usage is counted from the queue of finals over every broker, and survives a crash."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.estimator.usage.keeper import UsageKeeper
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.base import TenantId, encode, tag_of
from shared.contracts.tenants.usage import RequestMetered, UsageReported, UsageRequested
from shared.runtime.clock import SystemClock
from shared.tenants.usage_questions import ask_usage
from tests.brokers import BrokerRig, eventually
from tests.unit.estimator.usage.finals import ACME, final


@asynccontextmanager
async def keeping(broker: Broker, directory: Path | None) -> AsyncIterator[UsageKeeper]:
    keeper = UsageKeeper(broker=broker, clock=SystemClock(), directory=directory)
    stop = asyncio.Event()
    running = asyncio.create_task(keeper.run(stop))
    try:
        yield keeper
    finally:
        stop.set()
        await running


async def publish(broker: Broker, *finals: RequestMetered) -> None:
    for each in finals:
        message = OutMessage(body=encode(each), kind=tag_of(RequestMetered))
        await broker.publish(topology.TELEMETRY, topology.METERED_KEY, message)


async def asked(broker: Broker, tenant: TenantId | None = ACME) -> UsageReported | None:
    return await ask_usage(
        broker, lambda reply_to: UsageRequested(reply_to=reply_to, tenant=tenant)
    )


async def counts(broker: Broker, number: int, tenant: TenantId = ACME) -> None:
    async def are_counted() -> bool:
        found = await asked(broker, tenant)
        return found is not None and any(
            row.requests == {"completed": number} for row in found.rows
        )

    await eventually(are_counted)


async def test_a_final_counts_once_also_after_a_restart(
    broker_rig: BrokerRig, tmp_path: Path
) -> None:
    """Finals wait in the queue while no keeper runs; repetitions count once over restarts."""
    broker, other = await broker_rig.connect("agent"), await broker_rig.connect("estimator")
    await topology.declare(broker)
    # The final of `last` is counted when all finals before it are.
    last = TenantId("last")
    await publish(broker, final("r1"), final("r1"), final("r2"), final("r1", tenant=last))
    async with keeping(other, tmp_path):
        await counts(broker, 1, last)
        first = await asked(broker)
    await publish(broker, final("r2"), final("r3"), final("r2", tenant=last))
    async with keeping(other, tmp_path):
        await counts(broker, 2, last)
        second = await asked(broker)
    depth = await broker.depth(topology.USAGE)

    assert first is not None
    assert second is not None
    assert [row.requests for row in first.rows] == [{"completed": 2}]
    assert [row.requests for row in second.rows] == [{"completed": 3}]
    assert depth is not None
    assert depth.ready == 0


async def test_without_a_directory_usage_is_counted_in_memory(broker_rig: BrokerRig) -> None:
    """The answer has the rows of the asked tenant only."""
    broker = await broker_rig.connect("test")
    await topology.declare(broker)
    async with keeping(broker, None):
        await publish(broker, final("r1"), final("r2", tenant=TenantId("other")))
        await counts(broker, 1)
        every = await asked(broker, None)

    assert every is not None
    assert sum(row.total_tokens for row in every.rows) == 30


@pytest.mark.parametrize("body", [b"{", b'{"kind": "other"}'])
async def test_an_unreadable_message_is_dropped(broker_rig: BrokerRig, body: bytes) -> None:
    """It does not stop the counting of others."""
    broker = await broker_rig.connect("test")
    await topology.declare(broker)
    async with keeping(broker, None):
        await broker.publish(topology.TELEMETRY, topology.METERED_KEY, OutMessage(body=body))
        await publish(broker, final("r1"))
        await counts(broker, 1)
