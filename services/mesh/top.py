"""Live view of the mesh: instances, their work, and the SLO attainment of each QoS class."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from math import ceil

import msgspec
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from services.mesh.verbs.tables import add_columns
from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder
from shared.contracts.control import GatewayStatus
from shared.contracts.plans import PlanPublished
from shared.contracts.telemetry import InstanceStatus, RequestObserved

_Seen = InstanceStatus | RequestObserved | GatewayStatus | PlanPublished
_decode: Decoder[_Seen] = Decoder(_Seen)
RECENT_REQUESTS = 2000
NONE_FINISHED = "no request has finished since this command was started"


@dataclass(slots=True)
class View:
    """State of the mesh, collected from messages."""

    instances: dict[str, InstanceStatus] = field(default_factory=dict)
    gateways: dict[str, GatewayStatus] = field(default_factory=dict)
    recent: deque[RequestObserved] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    expected_late: float | None = None
    """Expected weighted share of the waiting requests that are late, by the last plan."""

    def on_message(self, message: _Seen) -> None:
        """Add *message* to the view of the mesh."""
        if isinstance(message, InstanceStatus):
            self.instances[message.instance_id] = message
        elif isinstance(message, GatewayStatus):
            self.gateways[message.gateway] = message
        elif isinstance(message, PlanPublished):
            self.expected_late = message.expected_late
        else:
            self.recent.append(message)

    def tables(self, *, folded: bool = False) -> tuple[Table | str, ...]:
        """
        The view of the mesh as text tables.

        Args:
            folded: True: names are folded where they do not fit, for a screen of fixed width.
        """
        finished = self._classes() if self.recent else NONE_FINISHED
        return (
            self._instances(folded=folded),
            self._registries(folded=folded),
            finished,
            *self._plan(),
        )

    def data(self) -> dict[str, object]:
        """The view of the mesh as data for JSON."""
        return {
            "instances": [msgspec.to_builtins(s) for _, s in sorted(self.instances.items())],
            "gateways": [msgspec.to_builtins(g) for _, g in sorted(self.gateways.items())],
            "recent_requests": len(self.recent),
            "attained": sum(observed.attained for observed in self.recent),
            "expected_late": self.expected_late,
        }

    def _plan(self) -> list[str]:
        """What the plan in force expects, if one was seen."""
        if self.expected_late is None:
            return []
        share = f"{self.expected_late:.1%} of the weight is expected late"
        return [f"of the requests that wait, {share} (relegated requests are late)"]

    def _instances(self, *, folded: bool) -> Table:
        table = Table(title="instances", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        add_columns(table, ("instance", "model"), folded=folded)
        for name in ("run", "win", "wait s", "KV", "done", "evict", "swap", "plan"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, status in sorted(self.instances.items()):
            totals = status.totals
            table.add_row(
                ("draining " if status.draining else "") + name,
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

    def _registries(self, *, folded: bool) -> Table:
        """Registry that each agent and gateway follows; equal digests are equal files."""
        table = Table(title="registry")
        add_columns(table, ("process", "registry"), folded=folded)
        for name in ("not in effect", "releasing"):
            table.add_column(name, overflow="fold")
        agents = [(name, each.registry, each.releasing) for name, each in self.instances.items()]
        gateways = [(name, each.registry, ()) for name, each in self.gateways.items()]
        for name, registry, releasing in sorted([*agents, *gateways], key=lambda row: row[0]):
            pending = {} if registry is None else registry.pending
            table.add_row(
                name,
                "-" if registry is None else registry.digest,
                "; ".join(f"{model}: {reason}" for model, reason in pending.items()) or "-",
                ", ".join(releasing) or "-",
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
                _quantile(ttft_s, 0.5),
                _quantile(ttft_s, 0.99),
            )
        return table


async def watch(broker: Broker, *, duration_s: float, live: bool) -> View:
    """
    Collect the state of the mesh for *duration_s*; update the screen if *live*.

    Returns:
        The collected state.
    """
    view = View()
    queue = topology.temporary_queue("top")
    keys = ("status.#", topology.OBSERVED_REQUEST_KEY, topology.plan_key("#"))
    bindings = [
        *((topology.TELEMETRY, key) for key in keys),
        (topology.CONTROL, topology.CONTROL_GATEWAYS),
    ]
    until = asyncio.get_running_loop().time() + duration_s
    async with listening(broker, queue, _decode, bindings, view.on_message):
        if not live:
            await asyncio.sleep(duration_s)
            return view
        console = Console(stderr=True, markup=False)
        with Live(_screen(view), console=console, auto_refresh=False) as screen:
            while asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.5)
                screen.update(_screen(view), refresh=True)
    return view


def _screen(view: View) -> Group:
    return Group(*view.tables(folded=True))


def _quantile(values: list[float], level: float) -> str:
    """
    The smallest of sorted times in seconds that at least *level* of them do not exceed, as text;
    `-` without times.
    """
    return f"{values[max(0, ceil(level * len(values)) - 1)]:.3f}" if values else "-"
