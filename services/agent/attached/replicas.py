"""The servers behind one name: each is an instance of its own while it exists."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from hashlib import sha256

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from services.agent.attached.endpoints import endpoints_of, name_of
from services.agent.backends.remote.server import Description, Server
from services.agent.backends.settings import RemoteSettings
from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.protocol import Broker
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    EngineError,
    MeshError,
)
from shared.runtime.cli import Ports
from shared.runtime.health import Health
from shared.runtime.tasks import every, pause

log = structlog.get_logger()
LOOK_PERIOD_S = 1.0
"""Period of looking for servers that have come or gone."""
CHECK_PERIOD_S = 3.0
"""Period of asking a server for its version and its models."""
MAX_ID_CHARS = 64
_DIGEST_CHARS = 12
HELD = "another agent serves with it"
Serve = Callable[[Ports[Settings], asyncio.Event], Awaitable[None]]


async def serve_replicas(
    ports: Ports[Settings], broker: Broker, stop: asyncio.Event, serve: Serve
) -> None:
    """
    Run an instance for each server behind the address in the settings until *stop*.

    Args:
        ports: Settings of all instances; their ids begin with `instance_id`.
        broker: Its connection holds the claims of servers.
        stop: Ends all instances, which then drain.
        serve: Runs one instance.

    Raises:
        SettingsError: The address is not a URL.
    """
    endpoints = endpoints_of(ports.settings.engine.remote)
    claims = Claims(broker, ports.settings)
    replicas: dict[str, Replica] = {}
    ports.health.details = lambda: {
        "replicas": {name: each.state for name, each in replicas.items()}
    }
    ports.health.metrics.register(ReplicaMetrics(replicas))

    async def look() -> None:
        wanted = {name_of(each): each for each in await endpoints.now()}
        for name in replicas.keys() - wanted.keys():
            replicas[name].leave()
        for name in [name for name, each in replicas.items() if each.ended]:
            replicas.pop(name).check()
        for name in wanted.keys() - replicas.keys():
            replicas[name] = Replica(ports, name, wanted[name], claims, serve)
        ports.health.started()

    try:
        await every(LOOK_PERIOD_S, look, stop=stop)
    finally:
        await endpoints.close()
        for each in replicas.values():
            each.leave()
        await asyncio.gather(*(each.task for each in replicas.values()))


class Claims:
    """
    Servers that only agents of this process serve with.

    Args:
        broker: Its connection holds the claims.
        settings: Say whether servers may be shared.
    """

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._shared = settings.engine.remote.shared

    async def take(self, name: str) -> bool:
        """
        Claim a server; return False if another agent has it.

        Raises:
            BrokerUnavailableError: The broker does not answer.
        """
        if self._shared:
            return True
        try:
            await self._broker.declare_queue(topology.server_claim(name))
        except BrokerConflictError:
            return False
        return True

    async def release(self, name: str) -> None:
        """Release a server, so that other agents may claim it."""
        if not self._shared:
            with contextlib.suppress(MeshError):  # it is released with the connection
                await self._broker.delete_queue(topology.server_claim(name).name)


class Replica:
    """
    One server, and its instance while it answers.

    A server that comes back with another version or other models gets a new instance.

    Args:
        ports: Settings of all instances.
        name: Name of the server.
        remote: Its address.
        claims: Servers of this process.
        serve: Runs one instance.
    """

    def __init__(
        self,
        ports: Ports[Settings],
        name: str,
        remote: RemoteSettings,
        claims: Claims,
        serve: Serve,
    ) -> None:
        settings = ports.settings
        self.instance_id = id_of_instance(settings.instance_id, name)
        self.state = "waiting"
        self.metrics: CollectorRegistry | None = None
        """Metrics of the instance."""
        engine = msgspec.structs.replace(settings.engine, remote=remote)
        self._ports = ports
        self._settings = msgspec.structs.replace(
            settings,
            instance_id=self.instance_id,
            engine=engine,
            initial_model=settings.models[0],
        )
        self._server = Server(remote)
        self._name = name
        self._claims = claims
        self._serve = serve
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(self._live(), name=f"replica {name}")

    @property
    def ended(self) -> bool:
        return self.task.done()

    def check(self) -> None:
        """Raise the error that has ended this replica, which is a bug."""
        self.task.result()

    def leave(self) -> None:
        """The server leaves: its instance drains."""
        self._gone.set()

    async def _live(self) -> None:
        try:
            while not self._gone.is_set():
                with contextlib.suppress(EngineError, BrokerUnavailableError):
                    await self._claimed(await self._server.describe())
                await pause(self._gone, LOOK_PERIOD_S)
        finally:
            await self._server.close()

    async def _claimed(self, description: Description) -> None:
        """Run the instance if no other agent serves with this server."""
        if not await self._claims.take(self._name):
            if self.state != HELD:
                log.warning("replica.held", url=self._server.url, hint="engine.remote.shared")
            self.state = HELD
            return
        try:
            await self._instance(description)
        finally:
            self.state = "waiting"
            await self._claims.release(self._name)

    async def _instance(self, description: Description) -> None:
        """Run the instance until the server leaves or changes."""
        health = Health(service="agent")
        self.metrics = health.metrics
        ports = replace(self._ports, settings=self._settings, health=health)
        stop = asyncio.Event()
        self.state = "serving"
        log.info("replica.found", instance_id=self.instance_id, url=self._server.url)
        watching = asyncio.create_task(
            self._until_changed(description, stop), name=f"watch {self._name}"
        )
        try:
            await self._serve(ports, stop)
        except (EngineError, BrokerUnavailableError) as error:
            log.error("replica.failed", instance_id=self.instance_id, error=str(error))
        finally:
            self.metrics = None
            watching.cancel()
            await asyncio.wait({watching})

    async def _until_changed(self, description: Description, stop: asyncio.Event) -> None:
        """Set *stop* when the server has left or differs from *description*."""
        while not await pause(self._gone, CHECK_PERIOD_S):
            try:
                now = await self._server.describe()
            except MeshError:
                continue  # the engine waits for the server
            if now != description:
                log.warning("replica.changed", instance_id=self.instance_id, url=self._server.url)
                break
        stop.set()


def id_of_instance(agent_id: str, name: str) -> str:
    """
    Id of the instance of the server *name*. An id that would be too long ends with a digest, since
    addresses often differ at their ends only.
    """
    whole = f"{agent_id}-{name}"
    if len(whole) <= MAX_ID_CHARS:
        return whole
    digest = sha256(whole.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{whole[: MAX_ID_CHARS - _DIGEST_CHARS - 1]}-{digest}"


class ReplicaMetrics(Collector):
    """
    Metrics of all instances, with the label `instance`.

    Args:
        replicas: The servers by name; live.
    """

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield each metric family once, with the samples of all instances."""
        families: dict[str, Metric] = {}
        for replica in self._replicas.values():
            for metric in replica.metrics.collect() if replica.metrics else ():
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for sample in metric.samples:
                    labels = {**sample.labels, "instance": replica.instance_id}
                    family.add_sample(sample.name, labels, sample.value)
        yield from families.values()
