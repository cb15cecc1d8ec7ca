"""The mesh of processes that a benchmark measures."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from ops.environment import broker_for
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.errors import SettingsError
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

MODEL = "tiny-llama"


def simulated_agent(name: str, engine: SimulatedSettings, model: str = MODEL) -> AgentSpec:
    """Specification of an agent with a simulated engine, whose *model* is active at the start."""
    settings: dict[str, Any] = {
        "initial_model": model,
        "engine": {"simulated": msgspec.to_builtins(engine)},
    }
    return AgentSpec(instance_id=name, settings=settings)


class BenchSpec(MeshSpec, frozen=True, kw_only=True):
    """A mesh whose leader exports its metrics on a port."""

    leader_port: int

    @property
    def leader_metrics(self) -> str:
        """URL of the leader's metrics."""
        return f"http://127.0.0.1:{self.leader_port}/metrics"

    def service_settings(self) -> dict[str, tuple[str, dict[str, Any]]]:
        found = MeshSpec.service_settings(self)
        service, settings = found["leader-0"]
        return found | {"leader-0": (service, settings | {"health_port": self.leader_port})}


class BenchMesh(ProcessMesh):
    """A mesh of processes whose leader exports its metrics."""

    spec: BenchSpec


@contextlib.asynccontextmanager
async def bench_mesh(
    broker: str | None,
    agents: tuple[AgentSpec, ...],
    *,
    planner: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    groupers: int = 1,
) -> AsyncIterator[BenchMesh]:
    """
    The agents and one of each other service as separate processes, over RabbitMQ.

    Args:
        broker: As for `ops.environment.broker_for`.
        agents: Agents of the mesh; the models have weights if an agent has a real engine.
        planner: Settings of the planner, except settings that all services share.
        gateway: Those of the gateway.
        groupers: Number of groupers.

    Raises:
        SettingsError: RabbitMQ is not available.
    """
    with broker_for(broker) as (url, line), tempfile.TemporaryDirectory() as directory:
        if url == EMBEDDED:
            raise SettingsError(f"this benchmark needs RabbitMQ; {line}")
        root = Path(directory)
        spec = BenchSpec(
            leader_port=free_port(),
            broker=url,
            registry=make_tiny_models(root / "models", weights=_real(agents)),
            log_dir=root / "log",
            gateway_port=free_port(),
            gateway=gateway or {},
            log_level="warning",
            agents=agents,
            planner=planner or {},
            groupers=groupers,
        )
        async with BenchMesh(spec) as mesh:
            yield mesh


def _real(agents: tuple[AgentSpec, ...]) -> bool:
    return any(agent.engine != "simulated" for agent in agents)


@contextlib.asynccontextmanager
async def bench_producer(mesh: ProcessMesh) -> AsyncIterator[Producer]:
    """A trusted producer with its own connection to the broker."""
    async with (
        mesh.open_broker("headway-bench") as broker,
        Producer(broker, name="bench", clock=SystemClock(), user_id="guest") as producer,
    ):
        yield producer
