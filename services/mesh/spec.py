"""Specification of a mesh."""

from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.lanes import LaneLayout

EMBEDDED = "embedded"
"""Value instead of a broker URL: all services run in one process, without an external broker."""
EMBEDDED_SEEN = (
    f"A mesh of `headway up --broker {EMBEDDED}` has no broker that commands reach: look at its "
    "gateway: the link to the console that `headway up` prints, and /metrics."
)
"""What commands say that find no mesh at their broker."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One agent of a mesh, with its settings that differ from the defaults."""

    instance_id: str
    engine: str = "simulated"
    settings: dict[str, Any] = {}
    """Additional settings of the agent, nested as in a settings file."""
    environment: dict[str, str] = {}
    """Environment variables of the agent's process besides those of the mesh."""
    place: str = ""
    """Devices of the agent and the model with which it begins, for operators; empty on a CPU."""

    def values(self) -> dict[str, Any]:
        """Content of the agent's settings file."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.settings))
        values["instance_id"] = self.instance_id
        values.setdefault("engine", {})["backend"] = self.engine
        return values


class MeshSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of a mesh on one machine."""

    broker: str
    """URL of an AMQP broker, or `embedded` for the in-process broker."""
    registry: Path
    log_dir: Path
    gateway_port: int
    gateway_host: str = "127.0.0.1"
    agents: tuple[AgentSpec, ...]
    gateways: int = 1
    """Number of gateways, on the ports from `gateway_port`."""
    groupers: int = 1
    leaders: int = 1
    log_level: str = "info"
    layout: LaneLayout = LaneLayout()
    gateway: dict[str, Any] = {}
    """Additional settings of the gateway."""
    planner: dict[str, Any] = {}
    """Additional settings of the planners."""
    estimator: dict[str, Any] = {}
    """Additional settings of the estimator."""
    tenants: Path | None = None
    """File with the policies of tenants."""

    @property
    def gateway_ports(self) -> range:
        return range(self.gateway_port, self.gateway_port + self.gateways)

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        return tuple(f"http://{self.gateway_host}:{port}" for port in self.gateway_ports)

    @property
    def gateway_url(self) -> str:
        """The URL of the first gateway."""
        return self.gateway_urls[0]

    def environments(self) -> dict[str, dict[str, str]]:
        """Name of each agent's process -> its variables besides those of the mesh."""
        return {f"agent-{agent.instance_id}": agent.environment for agent in self.agents}

    def service_settings(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name of each process of the mesh -> its service and settings."""
        common: dict[str, Any] = {
            "registry": str(self.registry),
            "log_level": self.log_level,
            "layout": msgspec.structs.asdict(self.layout),
        }
        if self.tenants is not None:
            common["tenants"] = str(self.tenants)
        if self.broker != EMBEDDED:
            common["amqp_url"] = self.broker
        processes: dict[str, tuple[str, dict[str, Any]]] = {
            f"agent-{agent.instance_id}": ("agent", common | agent.values())
            for agent in self.agents
        }
        processes |= {
            f"grouper-{number}": ("planner", common | self.planner | {"roles": ["grouper"]})
            for number in range(self.groupers)
        }
        processes |= {
            f"leader-{number}": ("planner", common | self.planner | {"roles": ["leader"]})
            for number in range(self.leaders)
        }
        processes["estimator"] = ("estimator", common | self.estimator)
        for number, port in enumerate(self.gateway_ports):
            processes[f"gateway-{number}" if number else "gateway"] = (
                "gateway",
                common | self.gateway | {"host": self.gateway_host, "port": port},
            )
        return processes
