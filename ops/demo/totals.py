"""Counters of all agents of a mesh, including killed processes."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError
from shared.contracts.telemetry import InstanceStatus

_decode: Decoder[InstanceStatus] = Decoder(InstanceStatus)
COUNTED = ("swaps", "evicted", "swapped_out", "relegated")


@dataclass(slots=True)
class AgentTotals:
    """
    Last status of each agent process.

    Counters start at 0 in each process. The last status of a killed process is up to one second
    old, so events in its last second are missing.
    """

    statuses: dict[tuple[str, str], InstanceStatus] = field(default_factory=dict)
    """Last status, by instance and incarnation."""

    def counts(self) -> dict[str, int]:
        """Sum of each counter over all agent processes so far."""
        totals = [status.totals for status in self.statuses.values()]
        return {name: sum(getattr(each, name) for each in totals) for name in COUNTED}

    def newest(self) -> dict[str, InstanceStatus]:
        """Newest status of each instance."""
        return {status.instance_id: status for status in self.statuses.values()}

    def running(self) -> int:
        """Number of requests in the engines, by the newest status of each instance."""
        return sum(status.running for status in self.newest().values())

    async def on_message(self, delivery: Delivery) -> None:
        """Store the status of an agent."""
        with contextlib.suppress(ContractError):  # messages of other kinds are not counted
            status = _decode(delivery.body)
            self.statuses[status.instance_id, status.incarnation] = status
        await delivery.settle(Settlement.ACK)


@contextlib.asynccontextmanager
async def agent_totals(broker: Broker) -> AsyncIterator[AgentTotals]:
    """Follow the statuses of all agents while the context is open."""
    totals = AgentTotals()
    queue = topology.temporary_queue("demo")
    await broker.declare_queue(queue)
    await broker.bind(
        BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key="status.#")
    )
    subscription = await broker.consume(queue.name, totals.on_message, prefetch=64)
    try:
        yield totals
    finally:
        await subscription.cancel()
