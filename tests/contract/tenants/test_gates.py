"""Groupers share a tenant's limits over every broker."""

import asyncio
from contextlib import AsyncExitStack

from services.planner.grouper.tenants import TenantGate
from shared.broker import topology
from shared.contracts.tenants.policies import RateLimitedError, TenantPolicy
from shared.runtime.clock import SystemClock
from tests.brokers import BrokerRig, eventually
from tests.contract.tenants.gates import ACME, open_gate
from tests.queued import a_request

LIMIT = 40


async def admitted(gates: list[TenantGate], number: int) -> int:
    """Ask for *number* requests, in turn at all gates; return how many were admitted."""

    async def ask(gate: TenantGate, name: str) -> bool:
        try:
            await gate.admit(a_request(name, tenant=ACME))
        except RateLimitedError:
            return False
        return True

    asked = [ask(gates[n % len(gates)], f"r{n}") for n in range(number)]
    return sum(await asyncio.gather(*asked))


async def test_three_groupers_admit_the_limit_together(broker_rig: BrokerRig) -> None:
    """Exactly the limit is admitted of four times as many requests, whichever grouper is asked."""
    broker = await broker_rig.connect("gates")
    await topology.declare(broker)
    policy = TenantPolicy(requests_per_minute=LIMIT)
    async with AsyncExitStack() as stack:
        gates = [
            await stack.enter_async_context(
                open_gate(broker, SystemClock(), policy, name=f"gate-{number}")
            )
            for number in range(3)
        ]

        number = await admitted(gates, 4 * LIMIT)
        for _ in range(3):
            await asyncio.sleep(0.3)
            number += await admitted(gates, 12)

    assert number == LIMIT


async def test_allocator_whose_consumer_is_ended_by_the_broker_gives_up_its_role(
    broker_rig: BrokerRig,
) -> None:
    broker = await broker_rig.connect("gates")
    await topology.declare(broker)
    policy = TenantPolicy(requests_per_minute=LIMIT)
    async with open_gate(broker, SystemClock(), policy, name="gate") as gate:
        await admitted([gate], 1)
        assert gate.allocator.term is not None
        await (await broker_rig.connect("other")).delete_queue(topology.TENANTS)
        await eventually(lambda: gate.allocator.term is None)
