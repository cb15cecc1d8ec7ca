"""
The mesh of the compose file as local processes: its own environment variables,
health checks and least-privilege users against a broker with the generated definitions.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import msgspec
import openai
import pytest

from ops.broker import PrivateNode
from ops.generate.definitions import definitions, render
from ops.ports import free_ports
from tests.brokers import eventually
from tests.unit.ops.deployment import ROOT, Container, compose, containers, seconds

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]

MESH = [
    container
    for container in containers()
    if container.entry.get("profiles", ["simulated"]) == ["simulated"]
]
READY_WITHIN_S = 180.0
STEP_S = 60.0


class Running:
    """
    Local process of a container's service, with local addresses.

    Args:
        container: Entry of the compose file.
        broker: Host, port and vhost.
        directory: Folder for the process's files.
        ports: Ports of the health endpoint and of the service.
    """

    def __init__(
        self, container: Container, broker: str, directory: Path, ports: tuple[int, int]
    ) -> None:
        self.container = container
        self.health_port, self.port = ports
        self.prefix = prefix = f"HEADWAY_{container.service.upper()}_"
        here = {
            f"{prefix}HEALTH_HOST": "127.0.0.1",
            f"{prefix}HEALTH_PORT": str(self.health_port),
            f"{prefix}HOST": "127.0.0.1",
            f"{prefix}PORT": str(self.port),
            f"{prefix}PROFILE_DIR": str(directory / "profiles"),
            f"{prefix}USAGE_DIR": str(directory / "usage"),
            f"{prefix}STORE__DATA_DIR": str(directory / "data"),
            "HEADWAY_REGISTRY": str(directory / "registry.json"),
            "HEADWAY_AMQP_URL": container.environment["HEADWAY_AMQP_URL"].replace(
                "rabbitmq:5672/", broker
            ),
        }
        replaced = {name: here[name] for name in container.environment.keys() & here.keys()}
        self.environment = {"PATH": os.environ["PATH"], **container.environment, **replaced}
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{self.container.service}",
            *arguments,
            cwd=ROOT,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def healthy(self) -> bool:
        """Run the container's health check as compose does."""
        assert self.process is not None
        assert self.process.returncode is None, f"{self.container} ended"
        *command, port = self.container.entry["healthcheck"]["test"][2:]
        assert port == self.container.environment[f"{self.prefix}HEALTH_PORT"]
        check = await asyncio.create_subprocess_exec(
            sys.executable, *command, str(self.health_port), cwd=ROOT
        )
        await asyncio.wait_for(check.communicate(), STEP_S)
        return check.returncode == 0

    async def stop(self) -> int:
        """Stop the process within compose's grace period; return its exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        grace_s = seconds(self.container.entry["stop_grace_period"])
        try:
            await asyncio.wait_for(self.process.communicate(), grace_s)
        except TimeoutError:
            self.process.kill()
            await self.process.communicate()
        return self.process.returncode or 0


@contextlib.asynccontextmanager
async def running(broker: str, directory: Path) -> AsyncIterator[dict[str, Running]]:
    ports = free_ports(2 * len(MESH))
    pairs = zip(ports[::2], ports[1::2], strict=True)
    mesh = {
        container.name: Running(container, broker, directory, pair)
        for container, pair in zip(MESH, pairs, strict=True)
    }
    try:
        for each in mesh.values():
            each.process = await each.start(*each.container.entry["command"])
        yield mesh
    finally:
        started = [each for each in mesh.values() if each.process is not None]
        codes = await asyncio.gather(*(each.stop() for each in started))
    assert dict(zip(mesh, codes, strict=True)) == dict.fromkeys(mesh, 0)


@pytest.fixture
def broker(private_node: PrivateNode, tmp_path: Path) -> str:
    """Host, port and vhost of a broker that has loaded the definitions."""
    vhost = f"compose-{uuid4().hex[:8]}"
    file = tmp_path / "definitions.json"
    file.write_text(render(definitions(vhost=vhost)))
    private_node.ctl("import_definitions", str(file))
    return f"127.0.0.1:{private_node.port}/{vhost}"


@pytest.fixture
async def store(tmp_path: Path) -> None:
    """The store that the compose file's `store` container migrates, beside the models."""
    directory = tmp_path / "models" / "data"
    directory.mkdir(parents=True)
    python, *arguments = compose()["services"]["store"]["entrypoint"]
    here = [str(directory) if each == "/data" else each for each in arguments]
    assert python == "python"
    migrating = await asyncio.create_subprocess_exec(
        sys.executable, *here, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
    )
    assert await asyncio.wait_for(migrating.wait(), STEP_S) == 0


async def make_models(directory: Path) -> None:
    """Run the compose file's `models` container."""
    python, *arguments = compose()["services"]["models"]["entrypoint"]
    here = [str(directory) if each == "/models" else each for each in arguments]
    assert python == "python"
    maker = await asyncio.create_subprocess_exec(
        sys.executable, *here, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
    )
    assert await asyncio.wait_for(maker.wait(), STEP_S) == 0


@pytest.fixture
async def models(tmp_path: Path) -> Path:
    """Output of the compose file's `models` container."""
    directory = tmp_path / "models"
    directory.mkdir(exist_ok=True)
    await make_models(directory)
    return directory


async def scraped(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await asyncio.wait_for(reader.read(), STEP_S)).decode()
    writer.close()
    await writer.wait_closed()
    return text


async def completed(mesh: dict[str, Running]) -> float:
    """Number of requests that agents have counted as answered."""
    texts = [await scraped(each.health_port) for each in mesh.values()]
    return sum(
        float(line.split()[-1])
        for text in texts
        for line in text.splitlines()
        if line.startswith("headway_agent_requests_completed_total")
    )


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("private_node", ["rabbitmq"], indirect=True)
async def test_the_mesh_becomes_healthy_serves_and_drains(broker: str, models: Path):
    async with running(broker, models) as mesh:
        for each in mesh.values():
            await eventually(each.healthy, within_s=READY_WITHIN_S)
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{mesh['gateway'].port}/v1",
            api_key="none",
            max_retries=0,
            timeout=30.0,
        )
        async with client:
            names = [model.id async for model in client.models.list()]
            answers = [
                await client.chat.completions.create(
                    model=name,
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=6,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for name in names
            ]

        assert [answer.usage and answer.usage.completion_tokens for answer in answers] == [6] * 3

        async def all_are_counted() -> bool:
            return await completed(mesh) == len(names)

        # An agent counts an answer once it is published and settled.
        await eventually(all_are_counted)
        metrics = {name: await scraped(each.health_port) for name, each in mesh.items()}
        assert "headway_planner_leader_active 1.0" in metrics["planner-leader"]
        assert "headway_planner_requests_admitted_total 3.0" in metrics["planner-grouper"]
        assert 'outcome="completed"} 3.0' in metrics["gateway"]


async def test_the_models_container_keeps_the_users_own_registry(tmp_path: Path):
    own = msgspec.json.encode({"models": []})
    (tmp_path / "registry.json").write_bytes(own)

    await make_models(tmp_path)

    assert (tmp_path / "registry.json").read_bytes() == own
