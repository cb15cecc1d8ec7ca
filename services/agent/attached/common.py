"""What the instances of one agent share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.agent.attached.shared_turns import SharedTurns
from services.agent.outbox import Outbox
from services.agent.settings import Settings
from shared.broker.protocol import Broker
from shared.runtime.cli import Ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What the instances of one agent share."""

    broker: Broker
    """Holds the claims of servers, and carries the tokens of all instances."""
    turns: SharedTurns
    outbox: Outbox
    """Sends the tokens of all instances, those for one producer in one message."""


@asynccontextmanager
async def opened_common(ports: Ports[Settings]) -> AsyncIterator[Common]:
    """
    Context with the common parts of all instances; at its end, no instance may run.

    Raises:
        BrokerUnavailableError: The broker does not answer.
    """
    settings = ports.settings
    async with ports.open_broker(f"headway-agent-{settings.instance_id}-common") as broker:
        outbox, stop = Outbox(broker, settings.flush_period_s), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(outbox.work(stop), name="outbox")
            try:
                yield Common(broker=broker, turns=SharedTurns(), outbox=outbox)
            finally:
                stop.set()
                outbox.stop()
