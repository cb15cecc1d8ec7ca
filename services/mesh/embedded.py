"""A mesh in one process over the in-process broker: nothing to install, same services."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import msgspec

import services.agent.service as agent
import services.estimator.service as estimator
import services.gateway.service as gateway
import services.planner.service as planner
from services.agent.settings import Settings as AgentSettings
from services.estimator.settings import Settings as EstimatorSettings
from services.gateway.settings import Settings as GatewaySettings
from services.mesh.ready import wait_ready
from services.mesh.spec import MeshSpec
from services.planner.settings import Settings as PlannerSettings
from shared.broker.connect import open_broker
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import Broker
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.cli import Ports
from shared.runtime.clock import SystemClock
from shared.runtime.health import Health

SERVICES: dict[str, tuple[Any, Any]] = {
    "agent": (AgentSettings, agent.serve),
    "planner": (PlannerSettings, planner.serve),
    "estimator": (EstimatorSettings, estimator.serve),
    "gateway": (GatewaySettings, gateway.serve),
}


class EmbeddedMesh:
    """Runs a `MeshSpec` as tasks of this process while the context is open."""

    def __init__(self, spec: MeshSpec, *, ready_timeout_s: float = 240.0) -> None:
        self.spec = spec
        self.hub = MemoryHub()
        self._ready_timeout_s = ready_timeout_s
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        try:
            for name, (service, values) in self.spec.service_settings().items():
                self._start(name, service, values)
            async with self.open_broker("headway-mesh") as broker:
                await wait_ready(
                    broker, self.spec, timeout_s=self._ready_timeout_s, check=self.check
                )
        except (
            BaseException
        ):  # cancelled or failed: what was begun is undone, and it is raised again
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def _start(self, name: str, service: str, values: dict[str, Any]) -> None:
        settings_type, serve = SERVICES[service]
        try:
            settings = msgspec.convert(
                values | {"amqp_url": "memory://"}, settings_type, strict=False
            )
        except msgspec.ValidationError as error:
            raise SettingsError(f"{name}: {error}") from error
        ports = Ports(
            settings=settings,
            open_broker=self.open_broker,
            clock=SystemClock(),
            health=Health(service=service),
        )
        self._stops[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(serve(ports, self._stops[name]), name=name)

    def check(self) -> None:
        """
        Nothing that was started has ended.

        Raises:
            MeshError: A service has; carries its error.
        """
        for name, task in self._tasks.items():
            if task.done():
                error = None if task.cancelled() else task.exception()
                raise MeshError(f"{name} ended: {error!r}") from error

    async def stop(self) -> None:
        """Agents first, then the rest."""
        for agents in (True, False):
            names = [name for name in self._tasks if name.startswith("agent-") is agents]
            for name in names:
                self._stops[name].set()
            await asyncio.gather(*(self._tasks.pop(name) for name in names), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def open_broker(self, client_name: str) -> AsyncIterator[Broker]:
        """A client of the mesh's broker."""
        async with open_broker("memory://", client_name=client_name, hub=self.hub) as broker:
            yield broker
