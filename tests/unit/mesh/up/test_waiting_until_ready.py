"""What `headway up` prints while its mesh starts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ops.ports import free_port
from services.mesh.ready import wait_ready
from services.mesh.spec import AgentSpec, MeshSpec
from services.mesh.verbs.cli_up import served_models
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.errors import MeshError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import InstanceStatus, LanesObserved
from shared.models.registry import ModelRegistry
from shared.runtime.health import serve_http

pytestmark = pytest.mark.virtual_time

AGENTS = (
    AgentSpec(instance_id="agent-0", settings={"initial_model": "tiny-llama"}),
    AgentSpec(
        instance_id="attached-0",
        engine="remote",
        settings={"engine": {"remote": {"url": "http://models.example:8000"}}},
    ),
)


class Starting:
    """A mesh that starts, and the lines that its wait prints."""

    def __init__(self, broker: MemoryBroker, spec: MeshSpec) -> None:
        self.broker, self.spec = broker, spec
        self.reasons: dict[str, str] = {}
        """Reasons of the gateway's /ready."""
        self.lines: list[str] = []

    async def gateway(self, _: Request) -> JSONResponse:
        return JSONResponse({"reasons": self.reasons}, status_code=503 if self.reasons else 200)

    async def wait(self, timeout_s: float = 600.0) -> None:
        async def check() -> None: ...

        await wait_ready(
            self.broker, self.spec, timeout_s=timeout_s, check=check, say=self.lines.append
        )

    async def report_agents(self, activating: ModelName | None = None) -> None:
        for name in ("agent-0", "attached-0-8000"):
            status = InstanceStatus(
                instance_id=InstanceId(name),
                incarnation="i",
                seq=1,
                at=1.0,
                engine="e",
                device="d",
                activating=activating,
            )
            key = topology.status_key(InstanceId(name))
            await self.broker.publish(topology.TELEMETRY, key, OutMessage.transient(status))
        lanes = LanesObserved(sender="grouper-0", incarnation="i", seq=1, at=1.0, layout=2)
        out = OutMessage.transient(lanes)
        await self.broker.publish(topology.TELEMETRY, topology.LANES_KEY, out)


@pytest.fixture
async def starting(tmp_path: Path) -> AsyncIterator[Starting]:
    spec = MeshSpec(
        broker="memory://",
        registry=tmp_path,
        log_dir=tmp_path,
        gateway_port=free_port(),
        agents=AGENTS,
    )
    async with MemoryBroker(MemoryHub(), client_name="up") as broker:
        found = Starting(broker, spec)
        app = Starlette(routes=[Route("/ready", found.gateway)])
        async with serve_http(app, host="127.0.0.1", port=spec.gateway_port):
            yield found


async def test_lines_say_what_loads_and_for_how_long(starting: Starting):
    waiting = asyncio.create_task(starting.wait())
    await asyncio.sleep(4.5)
    assert starting.lines == []
    await asyncio.sleep(11.0)
    assert starting.lines == [
        "agent-0: loading tiny-llama, 5 s",
        "attached-0: waiting for an answer of http://models.example:8000, 5 s",
        "groupers: 0 of 1 report, 5 s",
        "agent-0: loading tiny-llama, 10 s",
        "attached-0: waiting for an answer of http://models.example:8000, 10 s",
        "groupers: 0 of 1 report, 10 s",
    ]
    await starting.report_agents()
    await waiting


async def test_an_agent_that_loads_its_first_model_is_missing_although_it_reports(
    starting: Starting,
):
    waiting = asyncio.create_task(starting.wait())
    await asyncio.sleep(1.0)
    await starting.report_agents(activating=ModelName("tiny-llama"))
    await asyncio.sleep(6.0)
    assert starting.lines[0] == "agent-0: loading tiny-llama, 5 s"
    await starting.report_agents()
    await waiting


async def test_the_wait_ends_when_the_gateway_can_serve_each_model(starting: Starting):
    starting.reasons = {"models": "no instance can serve tiny-qwen yet"}
    waiting = asyncio.create_task(starting.wait())
    await asyncio.sleep(1.0)
    await starting.report_agents()
    await asyncio.sleep(6.0)
    url = starting.spec.gateway_url
    assert starting.lines[-1] == f"gateway {url}: no instance can serve tiny-qwen yet, 5 s"
    assert not waiting.done()
    starting.reasons = {}
    await waiting


async def test_the_error_says_what_is_missing(starting: Starting):
    with pytest.raises(MeshError, match=r"not ready after 30 s: agent-0: loading tiny-llama; atta"):
        await starting.wait(timeout_s=30.0)


def test_models_are_those_that_the_agents_are_started_for():
    registry = ModelRegistry(
        (
            ModelEntry(name=ModelName("own"), path="own", max_model_len=64),
            ModelEntry(name=ModelName("attached"), takes="bodies", max_model_len=64),
            ModelEntry(name=ModelName("elsewhere"), takes="bodies", max_model_len=64),
        )
    )
    own, remote = (
        AgentSpec(instance_id="agent-0"),
        AgentSpec(instance_id="attached-0", engine="remote", settings={"models": ["attached"]}),
    )
    assert served_models((own, remote), registry) == ["own", "attached"]
    assert served_models((remote,), registry) == ["attached"]
