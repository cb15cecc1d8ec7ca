"""Limits of tenants at a grouper, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ops.sim.virtual_time import LoopClock
from services.planner.grouper.tenants import WAIT_S, TenantGate
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.contracts.base import RequestId, encode
from shared.contracts.errors import CapacityError
from shared.contracts.tenants.policies import (
    QUOTA_SPENT,
    RateLimitedError,
    TenantDemand,
    TenantPolicy,
)
from shared.contracts.tenants.usage import UsageToday
from shared.runtime.clock import Clock
from shared.tenants.policies import Policies
from tests.contract.tenants.gates import ACME, gate_of, open_gate
from tests.deliveries import LooseDelivery
from tests.queued import a_request

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def one_gate(policy: TenantPolicy, clock: Clock | None = None) -> AsyncIterator[TenantGate]:
    """The only gate on a broker of its own; its clock is that of the event loop by default."""
    async with MemoryBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        async with open_gate(broker, clock or LoopClock(), policy, name="g") as gate:
            yield gate


async def refused(gate: TenantGate, name: str) -> CapacityError | None:
    try:
        await gate.admit(a_request(name, tenant=ACME))
    except CapacityError as error:
        return error
    return None


async def test_a_refusal_names_limit_tenant_and_delay() -> None:
    """The error has the state of the limit, for OpenAI's headers."""
    async with one_gate(TenantPolicy(requests_per_minute=3)) as gate:
        results = [await refused(gate, f"r{n}") for n in range(5)]

    assert results[:3] == [None, None, None]
    error = results[3]
    assert isinstance(error, RateLimitedError)
    assert "requests_per_minute of tenant 'acme' is 3" in str(error)
    assert error.requests is not None
    assert (error.requests.limit, error.requests.remaining) == (3, 0)
    assert 50 < error.retry_after_s <= 60


async def test_after_a_minute_requests_are_admitted_again() -> None:
    """The window slides."""
    async with one_gate(TenantPolicy(requests_per_minute=2)) as gate:
        before = [await refused(gate, f"r{n}") for n in range(3)]
        await asyncio.sleep(61.0)
        after = [await refused(gate, f"s{n}") for n in range(3)]

    assert [error is None for error in before] == [True, True, False]
    assert [error is None for error in after] == [True, True, False]


async def test_a_request_of_a_tenant_without_limits_does_not_wait() -> None:
    """Without limits there are no permits, and no messages about them."""
    async with one_gate(TenantPolicy()) as gate:
        waited = await gate.admit(a_request("r", tenant=ACME))

    assert not waited


async def test_a_request_above_the_whole_limit_is_refused_at_once() -> None:
    """It could never be admitted; the error says how much it needs."""
    async with one_gate(TenantPolicy(tokens_per_minute=5)) as gate:
        error = await refused(gate, "r")

    assert isinstance(error, RateLimitedError)
    assert "tokens_per_minute" in str(error)
    assert "the request needs" in str(error)


async def test_a_spent_budget_is_an_insufficient_quota() -> None:
    """The budget counts what finals have used today; the delay is the rest of the day (UTC)."""
    clock = LoopClock()
    async with one_gate(TenantPolicy(daily_tokens=1000), clock) as gate:
        before = await refused(gate, "r1")
        today = int(clock.now() // 86_400)
        gate.on_usage(UsageToday(day=today, tokens={ACME: 1000}))
        after = await refused(gate, "r2")
        gate.on_usage(UsageToday(day=today - 1, tokens={ACME: 1000}))
        of_yesterday = await refused(gate, "r3")

    assert (before, of_yesterday) == (None, None)
    assert isinstance(after, RateLimitedError)
    assert after.code == QUOTA_SPENT
    assert after.retry_after_s == 86_400 - clock.now() % 86_400


async def test_without_an_allocator_requests_are_refused_after_a_wait() -> None:
    """The demands reach no allocator: the first request waits, the next one does not."""
    async with MemoryBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        policy = TenantPolicy(requests_per_minute=3)
        async with open_gate(broker, LoopClock(), policy, name="g") as gate:
            await broker.unbind(
                next(each for each in topology.BINDINGS if each.queue == topology.TENANTS)
            )
            loop = asyncio.get_running_loop()
            begun = loop.time()
            first = await refused(gate, "r1")
            took_s, begun = loop.time() - begun, loop.time()
            second = await refused(gate, "r2")

    assert first is not None
    assert second is not None
    assert (first.status, second.status) == (503, 503)
    assert WAIT_S <= took_s <= WAIT_S + 1
    assert loop.time() - begun < 0.1


async def test_the_same_request_uses_permits_once() -> None:
    """A request that is delivered again counts once among those in progress."""
    async with one_gate(TenantPolicy(concurrent_requests=1)) as gate:
        results = [await refused(gate, name) for name in ("r1", "r1", "r2")]

    assert [error is None for error in results] == [True, True, False]


async def test_a_demand_of_a_lost_connection_makes_no_allocator() -> None:
    """Its handler may begin after the loss; another process has the queue then."""
    demand = TenantDemand(source="h", seq=1, at=0.0)
    async with MemoryBroker(MemoryHub()) as broker:
        gate = gate_of(broker, LoopClock(), Policies(), source="g")
        await gate.allocate(LooseDelivery(body=encode(demand), has_returned=lambda: True))

    assert gate.allocator.term is None


async def test_open_requests_are_shared_and_come_back() -> None:
    """Requests in progress count over all groupers, and no longer when they have ended."""
    policy, clock = TenantPolicy(concurrent_requests=2), LoopClock()
    async with MemoryBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        async with (
            open_gate(broker, clock, policy, name="g") as first,
            open_gate(broker, clock, policy, name="h") as second,
        ):
            before = [await refused(first, "r1"), await refused(second, "r2")]
            above = await refused(second, "r3")
            first.ended(ACME, RequestId("r1"))
            await asyncio.sleep(1.0)
            after = [await refused(second, name) for name in ("r4", "r5")]

    assert before == [None, None]
    assert isinstance(above, RateLimitedError)
    assert "concurrent_requests of tenant 'acme' is 2" in str(above)
    assert [error is None for error in after] == [True, False]
