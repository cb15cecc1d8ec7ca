"""A mesh with steady requests that a Prometheus server watches with short windows."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from ops.alerts import shorten
from ops.broker import PrivateNode
from ops.ports import free_port, free_ports
from ops.prometheus import PrivatePrometheus, Sample
from services.mesh.processes import MeshProcess, ProcessMesh
from services.mesh.spec import MeshSpec
from shared.contracts.qos import Slo
from shared.contracts.requests import Final, ReplyMode
from shared.producer.producer import Producer
from tests.brokers import eventually, release_of
from tests.e2e.meshes import read, request

FACTOR = 20
"""Divisor of all times in the rules: five minutes are 15 s."""
SPACING_S = 0.15
SLOS = (Slo(ttft_s=30.0, tbt_s=10.0), Slo(ttlt_s=120.0), Slo())
"""Targets that hold while processes are restarted."""


class ObservedSpec(MeshSpec, frozen=True, kw_only=True):
    """A mesh whose processes export metrics, each on a port of its own."""

    ports: dict[str, int]

    def service_settings(self) -> dict[str, tuple[str, dict[str, Any]]]:
        return {
            name: (service, settings | {"health_port": self.ports[name]})
            for name, (service, settings) in MeshSpec.service_settings(self).items()
        }


def observed(spec: MeshSpec) -> ObservedSpec:
    """*spec* with ports for metrics."""
    names = spec.service_settings().keys()
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    return ObservedSpec(**msgspec.structs.asdict(spec), ports=ports)


@contextmanager
def observed_node(directory: Path) -> Iterator[tuple[PrivateNode, int]]:
    """A RabbitMQ node with metrics, and the port of these."""
    port = free_port()
    node = PrivateNode(
        directory,
        release=release_of("rabbitmq"),
        settings={"prometheus.tcp.ip": "127.0.0.1", "prometheus.tcp.port": port},
        plugins=("rabbitmq_prometheus",),
    )
    node.start()
    try:
        yield node, port
    finally:
        node.close()


class Watch:
    """
    A Prometheus server that scrapes a mesh and its broker each second, with the rules of the
    project and times divided by `FACTOR`.
    """

    def __init__(self, spec: ObservedSpec, broker_port: int, directory: Path) -> None:
        shorten(FACTOR, directory / "rules")
        self.spec = spec
        self.server = PrivatePrometheus(
            directory / "prometheus",
            {
                "global": {
                    "scrape_interval": "1s",
                    "scrape_timeout": "1s",
                    "evaluation_interval": "1s",
                },
                "rule_files": [f"{directory}/rules/*.yml"],
                "scrape_configs": [
                    {
                        "job_name": "headway",
                        "static_configs": [
                            {"targets": [f"127.0.0.1:{port}"], "labels": {"service": name}}
                            for name, port in spec.ports.items()
                        ],
                    },
                    {
                        "job_name": "rabbitmq",
                        "static_configs": [{"targets": [f"127.0.0.1:{broker_port}"]}],
                    },
                ],
            },
        )

    async def query(self, expression: str) -> list[Sample]:
        return await asyncio.to_thread(self.server.query, expression)

    async def firing(self) -> dict[str, dict[str, Any]]:
        """Alerts that fire now, by name."""
        alerts = await asyncio.to_thread(self.server.alerts)
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}

    async def fired_since(self, begun_at: float) -> set[str]:
        """Names of the alerts that have fired since *begun_at*, in Unix seconds."""
        elapsed_ms = round(1000 * (time.time() - begun_at))
        samples = await self.query(
            f'count_over_time(ALERTS{{alertstate="firing"}}[{elapsed_ms}ms])'
        )
        return {each.labels["alertname"] for each in samples}

    async def until_quiet(self) -> None:
        """Wait until no alert fires."""

        async def is_quiet() -> bool:
            return not await self.firing()

        await eventually(is_quiet, within_s=120.0)

    async def until_scraped(self) -> None:
        """Wait until every process and the broker have been scraped, and nothing fires."""

        async def is_scraped() -> bool:
            up = await self.query("up == 1")
            return len(up) == len(self.spec.ports) + 1

        await eventually(is_scraped)
        await self.until_quiet()


@asynccontextmanager
async def watched(spec: ObservedSpec, broker_port: int, directory: Path) -> AsyncIterator[Watch]:
    """A watch of a running mesh."""
    watch = Watch(spec, broker_port, directory)
    await asyncio.to_thread(watch.server.start)
    try:
        await watch.until_scraped()
        yield watch
    finally:
        await asyncio.to_thread(watch.server.stop)


async def replaced(mesh: ProcessMesh, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Stop a process of *mesh*, and start it again with changed settings."""
    await mesh.processes[name].stop()
    service, settings = mesh.spec.service_settings()[name]
    change(settings)
    mesh.processes[name] = MeshProcess(
        name, service=service, settings=settings, directory=mesh.spec.log_dir
    )
    await mesh.restart(name)


@asynccontextmanager
async def steady_requests(producer: Producer) -> AsyncIterator[list[Final]]:
    """
    Context in which requests of all classes are sent at a steady rate; at its end all of them have
    been answered, and their finals are in the list.
    """
    finals: list[Final] = []
    stop = asyncio.Event()

    async def ask(number: int) -> None:
        body = request(
            number,
            max_tokens=20,
            # Tokens, none of which is that of the poison request.
            prompt=tuple(range(10, 30 + number % 20)),
            slo=SLOS[number % len(SLOS)],
        )
        generation = await producer.submit(body, reply=ReplyMode.STREAM)
        finals.append((await read(generation)).final)

    async def send() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in count():
                if stop.is_set():
                    return
                tasks.create_task(ask(number))
                await asyncio.sleep(SPACING_S)

    sender = asyncio.create_task(send(), name="steady requests")
    try:
        yield finals
    finally:
        stop.set()
        await asyncio.wait_for(sender, 120.0)
