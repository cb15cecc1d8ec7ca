"""
A mesh in one process over the in-process broker; its services run unchanged, without an external
broker.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import services.agent.service as agent
import services.estimator.service as estimator
import services.gateway.service as gateway
import services.planner.service as planner
from services.agent.settings import Settings as AgentSettings
from services.estimator.settings import Settings as EstimatorSettings
from services.gateway.settings import Settings as GatewaySettings
from services.mesh.mesh import READY_TIMEOUT_S, Ended, Mesh, serves
from services.mesh.ready import Say, silent
from services.mesh.spec import MeshSpec
from services.planner.settings import Settings as PlannerSettings
from shared.broker.connect import open_broker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.cli import Ports
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.health import Health
from shared.runtime.lifecycle import EXIT_USAGE, first_error
from shared.runtime.settings import converted
from shared.runtime.tasks import every
from shared.store.location import this_process
from shared.store.requests.memory_meshes import HOLD_PERIOD_S, MeshHold
from shared.store.store import opened_store
from shared.tracing.opening import opened_tracer

SERVICES: dict[str, tuple[Any, Any]] = {
    "agent": (AgentSettings, agent.serve),
    "planner": (PlannerSettings, planner.serve),
    "estimator": (EstimatorSettings, estimator.serve),
    "gateway": (GatewaySettings, gateway.serve),
}


class EmbeddedMesh(Mesh):
    """
    Runs the services of a mesh as tasks of this process.

    Args:
        clock: Clock of the services; by default that of the system.
    """

    def __init__(
        self,
        spec: MeshSpec,
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
        say: Say = silent,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(spec, ready_timeout_s=ready_timeout_s, say=say)
        self.hub = MemoryHub(clock)
        self.healths: dict[str, Health] = {}
        """Health and metrics of each service that was started, by name."""
        self._clock = clock or SystemClock()
        self._name = this_process()
        self._holding = AsyncExitStack()
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        # All settings are checked before anything starts.
        services = self.spec.service_settings()
        for name, (service, values) in services.items():
            self._settings(name, service, values)
        await self._holding.enter_async_context(self._shown_in_store())
        for name, (service, values) in services.items():
            self._start(name, service, values)

    def _start(self, name: str, service: str, values: dict[str, Any]) -> None:
        _, serve = SERVICES[service]
        settings = self._settings(name, service, values)
        stop = self._stops[name] = asyncio.Event()
        health = self.healths[name] = Health(service=service)

        async def run() -> None:
            async with opened_tracer(service, os.environ) as tracer:
                ports = Ports(
                    settings=settings,
                    open_broker=self.open_broker,
                    clock=self._clock,
                    health=health,
                    tracer=tracer,
                )
                await serve(ports, stop)

        self._tasks[name] = asyncio.create_task(run(), name=name)

    def _settings(self, name: str, service: str, values: dict[str, Any]) -> Any:
        """
        Settings of the service *name*: *values*, and what its process would read of the
        environment.

        Raises:
            SettingsError: They are invalid; the message names the service, and the field or the
                variable.
        """
        settings_type, _ = SERVICES[service]
        own = {"amqp_url": "memory://"}
        if "store" in settings_type.__struct_fields__:
            own["store.memory_mesh"] = self._name
        environ = os.environ | self.spec.environments().get(name, {})
        try:
            return converted(
                settings_type, service=service, environ=environ, values=values, overrides=own
            )
        except SettingsError as error:
            raise SettingsError(f"{name}: {error}") from error

    def ended(self) -> list[Ended]:
        return [
            Ended(name, _code_of(task), f": {_words(_error_of(task))}")
            for name, task in self._tasks.items()
            if task.done()
        ]

    async def retry_starts(self) -> None:
        """None: a broker in this process always answers."""

    async def kill(self, name: str) -> None:
        """
        Cancel one service without a drain.

        As after a lost connection, the service's engine ends and the broker requeues its
        unacknowledged deliveries.
        """
        task = self._tasks.pop(name)
        task.cancel()
        # Set the stop event, since a loop may miss the cancellation: before Python 3.12, `wait_for`
        # returns instead if its event is set at the same time. The service's body is cancelled by
        # now and does not drain.
        self._stops.pop(name).set()
        await asyncio.gather(task, return_exceptions=True)

    async def restart(self, name: str) -> None:
        self._start(name, *self.spec.service_settings()[name])

    async def stop_services(self, *, serving: bool) -> None:
        names = [name for name in self._tasks if serves(name) is serving]
        for name in names:
            self._stops[name].set()
        await asyncio.gather(*(self._tasks.pop(name) for name in names), return_exceptions=True)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self._holding.aclose()

    @asynccontextmanager
    async def _shown_in_store(self) -> AsyncIterator[None]:
        """
        Context in which the store shows that this mesh lives: when it is gone, the next mesh at the
        store ends the requests that it had in memory.
        """
        planner_settings = self._settings("planner", "planner", self.spec.planner)
        async with opened_store(planner_settings.store) as store:
            if store is None:
                yield
                return
            stop, hold = asyncio.Event(), MeshHold(store.memory_meshes, self._name)
            holding = asyncio.create_task(
                every(HOLD_PERIOD_S, hold.show, stop=stop), name="hold the mesh's requests"
            )
            try:
                yield
            finally:
                stop.set()
                await holding
                await hold.end()

    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        return open_broker("memory://", client_name=client_name, hub=self.hub)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else first_error(task.exception())


def _words(error: BaseException | None) -> str:
    return str(error) if isinstance(error, MeshError) else repr(error)


def _code_of(task: asyncio.Task[None]) -> int | None:
    """The exit code that a process would have, as far as a restart depends on it."""
    return EXIT_USAGE if isinstance(_error_of(task), SettingsError) else None
