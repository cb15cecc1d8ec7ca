"""Gates of tenants over a broker, as groupers have them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from services.planner.grouper.tenants import DEMAND_PERIOD_S, TenantGate
from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, TenantId
from shared.contracts.tenants.policies import TenantDemand, TenantGrants, TenantPolicy
from shared.runtime.clock import Clock
from shared.runtime.tasks import every
from shared.tenants.policies import Policies
from solver.tenants.allocator import Allocator
from solver.tenants.leases import Holder

ACME = TenantId("acme")
_decode: Decoder[TenantDemand | TenantGrants] = Decoder(TenantDemand | TenantGrants)


def gate_of(
    broker: Broker,
    clock: Clock,
    policies: Policies,
    *,
    source: str,
    outstanding: Callable[[TenantId], int] = lambda _tenant: 0,
) -> TenantGate:
    """A gate that receives no messages."""
    return TenantGate(
        broker=broker,
        clock=clock,
        policies=policies,
        holder=Holder(source=source),
        allocator=Allocator(
            limit=lambda tenant, kind: policies.policy(tenant).limit(kind),
            listens_since=clock.now(),
        ),
        outstanding=outstanding,
    )


@asynccontextmanager
async def open_gate(
    broker: Broker, clock: Clock, policy: TenantPolicy, *, name: str
) -> AsyncIterator[TenantGate]:
    """A gate that takes part in sharing the limits of `ACME`."""
    gate = gate_of(broker, clock, Policies(tenants={ACME: policy}), source=name)

    def on_message(message: TenantDemand | TenantGrants) -> None:
        if isinstance(message, TenantDemand):
            gate.on_demand(message)
        else:
            gate.on_grants(message)

    keys = (topology.TENANT_DEMAND_KEY, topology.TENANT_GRANTS_KEY)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        queue = topology.temporary_queue(name)
        bindings = [(topology.TELEMETRY, key) for key in keys]
        await stack.enter_async_context(listening(broker, queue, _decode, bindings, on_message))
        subscription = await broker.consume(
            topology.TENANTS, gate.allocate, prefetch=64, on_broken=gate.deposed
        )
        stack.push_async_callback(subscription.cancel)
        reports = asyncio.create_task(every(DEMAND_PERIOD_S, gate.report, stop=stop))
        try:
            yield gate
        finally:
            stop.set()
            await reports
