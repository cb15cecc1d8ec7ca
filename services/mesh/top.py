"""A live view of the mesh: instances, their work, and how classes are doing."""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError
from shared.contracts.telemetry import InstanceStatus, RequestObserved

_decode: Decoder[InstanceStatus | RequestObserved] = Decoder(InstanceStatus | RequestObserved)
RECENT_REQUESTS = 2000


@dataclass(slots=True)
class View:
    """What has been heard."""

    instances: dict[str, InstanceStatus] = field(default_factory=dict)
    recent: deque[RequestObserved] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))

    async def on_message(self, delivery: Delivery) -> None:
        with suppress(ContractError):  # a newer kind than this command knows
            match _decode(delivery.body):
                case InstanceStatus() as status:
                    self.instances[status.instance_id] = status
                case RequestObserved() as observed:
                    self.recent.append(observed)
        await delivery.settle(Settlement.ACK)

    def tables(self) -> Group:
        """The view as two tables."""
        return Group(self._instances(), self._classes())

    def data(self) -> dict[str, object]:
        """The view for machines."""
        return {
            "instances": [msgspec.to_builtins(s) for _, s in sorted(self.instances.items())],
            "recent_requests": len(self.recent),
            "attained": sum(observed.attained for observed in self.recent),
        }

    def _instances(self) -> Table:
        table = Table(title="instances")
        for name in ("instance", "engine", "model", "running", "window", "backlog s", "KV",
                     "done", "evicted", "swaps", "plan"):  # fmt: skip
            table.add_column(name, justify="left" if name in ("instance", "model") else "right")
        for name, status in sorted(self.instances.items()):
            totals = status.totals
            table.add_row(
                name + (" (draining)" if status.draining else ""),
                status.engine,
                status.model or "-",
                f"{status.running}/{status.max_running}",
                str(status.waiting),
                f"{status.backlog_s:.1f}",
                f"{status.kv_utilization:.0%}",
                str(totals.completed),
                str(totals.evicted),
                str(totals.swaps),
                str(status.plan_epoch),
            )
        return table

    def _classes(self) -> Table:
        table = Table(title=f"last {len(self.recent)} requests")
        for name in ("class", "requests", "attained", "TTFT p50 s", "TTFT p99 s"):
            table.add_column(name, justify="left" if name == "class" else "right")
        for qos_class in sorted({o.qos_class.value for o in self.recent}):
            members = [o for o in self.recent if o.qos_class.value == qos_class]
            ttft_s = sorted(o.first_token_at - o.arrived_at for o in members if o.first_token_at)
            table.add_row(
                qos_class,
                str(len(members)),
                f"{sum(o.attained for o in members) / len(members):.1%}",
                f"{_quantile(ttft_s, 0.5):.3f}",
                f"{_quantile(ttft_s, 0.99):.3f}",
            )
        return table


async def watch(broker: Broker, *, duration_s: float, live: bool) -> View:
    """
    Follow the mesh for *duration_s*, on screen if *live*.

    Returns:
        What was heard.
    """
    view = View()
    queue = topology.passing_queue("top")
    await broker.declare_queue(queue)
    for key in ("status.#", topology.OBSERVED_REQUEST_KEY):
        await broker.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key=key)
        )
    subscription = await broker.consume(queue.name, view.on_message, prefetch=256)
    loop = asyncio.get_running_loop()
    until = loop.time() + duration_s
    try:
        if not live:
            await asyncio.sleep(duration_s)
            return view
        with Live(view.tables(), console=Console(stderr=True), auto_refresh=False) as screen:
            while loop.time() < until:
                await asyncio.sleep(0.5)
                screen.update(view.tables(), refresh=True)
    finally:
        await subscription.cancel()
    return view


def _quantile(values: list[float], level: float) -> float:
    return values[min(len(values) - 1, int(level * len(values)))] if values else 0.0
