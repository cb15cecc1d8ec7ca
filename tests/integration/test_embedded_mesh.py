"""All services in one process, with simulated engines."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ops.ports import free_port
from services.mesh.embedded import EmbeddedMesh
from services.mesh.queues import count_queues
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder
from shared.contracts.errors import SettingsError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed
from shared.contracts.telemetry import InstanceStatus, Residency
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.brokers import eventually
from tests.queued import MODEL, OTHER

SLOS = (Slo(ttft_s=5.0, tbt_s=1.0), Slo(ttlt_s=60.0), Slo())
FAST = {"simulated": {"time_scale": 0.1, "cold_activation_s": 0.1}}


def spec(directory: Path, **agent: Any) -> MeshSpec:
    return MeshSpec(
        broker=EMBEDDED,
        registry=make_tiny_models(directory / "models", weights=False),
        log_dir=directory / "log",
        gateway_port=free_port(),
        agents=tuple(
            AgentSpec(instance_id=name, settings={"engine": FAST, "drain_timeout_s": 5.0} | agent)
            for name in ("a", "b")
        ),
        planner={"leader": {"settle_s": 0.5, "plan_period_s": 0.1}},
    )


def request(number: int, **fields: Any) -> InferenceRequest:
    values: dict[str, Any] = {
        "model": MODEL,
        "prompt": f"request {number}",
        "max_tokens": 20,
        "temperature": 0.0,
        "ignore_eos": True,
        "slo": SLOS[number % 3],
    }
    return InferenceRequest(**(values | fields))


@asynccontextmanager
async def producing(mesh: EmbeddedMesh) -> AsyncIterator[Producer]:
    async with (
        mesh.open_broker("producer") as broker,
        Producer(broker, name="test", clock=SystemClock()) as producer,
    ):
        yield producer


async def waiting(mesh: EmbeddedMesh) -> dict[str, int]:
    """Messages that wait for service or for an operator."""
    models = ModelRegistry.load(mesh.spec.registry).bases
    async with mesh.open_broker("count") as broker:
        counts = await count_queues(broker, models, LaneLayout())
    soft = ("headway.leader", "headway.estimator", "headway.work-queues")
    return {count.queue: count.ready for count in counts if count.ready and count.queue not in soft}


@pytest.mark.slow
async def test_every_request_of_every_class_and_model_is_answered(tmp_path: Path):
    """With two agents and two models, the leader must give each model an instance."""
    async with EmbeddedMesh(spec(tmp_path)) as mesh, producing(mesh) as producer:
        bodies = [request(n, model=MODEL if n % 2 else OTHER) for n in range(24)]
        generations = [
            await producer.submit(body, reply=ReplyMode.STREAM if n % 4 else ReplyMode.FINAL)
            for n, body in enumerate(bodies)
        ]
        async with asyncio.timeout(60):
            parts = [[part async for part in generation] for generation in generations]
            finals = [await generation.final() for generation in generations]
        for given, final, body in zip(parts, finals, bodies, strict=True):
            assert isinstance(final, RequestCompleted), final
            assert (final.model, len(final.token_ids)) == (body.model, 20)
            assert tuple(t for part in given for t in part.token_ids) == final.token_ids
            assert "".join(part.text for part in given) == final.text
        assert await waiting(mesh) == {}
        mesh.check()


@pytest.mark.slow
async def test_refusals_and_cancellations_are_answered(tmp_path: Path):
    async with (
        EmbeddedMesh(spec(tmp_path, initial_model=MODEL)) as mesh,
        producing(mesh) as producer,
    ):
        async with asyncio.timeout(60):
            refused = await producer.submit(request(0, model="absent"), reply=ReplyMode.STREAM)
            final = await refused.final()
            assert isinstance(final, RequestFailed)
            assert (final.error.code, final.error.param) == ("model_not_found", "model")
            cancelled = await producer.submit(request(1, max_tokens=3000), reply=ReplyMode.STREAM)
            await anext(cancelled)
            await cancelled.cancel()
            ended = await cancelled.final()
            assert isinstance(ended, RequestFailed)
            assert ended.error.code == "cancelled"
            after = await (await producer.submit(request(2), reply=ReplyMode.FINAL)).final()
            assert isinstance(after, RequestCompleted)
        mesh.check()


async def test_a_ready_agent_has_its_warm_models(tmp_path: Path):
    statuses: list[InstanceStatus] = []
    bindings = [(topology.TELEMETRY, topology.STATUS_KEYS)]
    async with (
        EmbeddedMesh(spec(tmp_path, initial_model=MODEL, warm_models=[OTHER])) as mesh,
        mesh.open_broker("watch") as broker,
        listening(
            broker,
            topology.temporary_queue("watch"),
            Decoder[InstanceStatus](InstanceStatus),
            bindings,
            statuses.append,
        ),
    ):
        await eventually(lambda: bool(statuses))

    residency = {each.model: each.residency for each in statuses[0].models}
    assert (residency[MODEL], residency[OTHER]) == (Residency.ACTIVE, Residency.WARM)


async def test_invalid_settings_are_refused_at_once(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"agent-a.*nonsense"):
        await EmbeddedMesh(spec(tmp_path, nonsense=1)).__aenter__()


async def test_a_misspelt_variable_of_a_service_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_GATEWAY_PRT", "1")
    mesh = EmbeddedMesh(spec(tmp_path))
    with pytest.raises(SettingsError, match=r"^gateway: HEADWAY_GATEWAY_PRT: .*`prt`"):
        await mesh.__aenter__()
    assert not mesh.healths


async def test_services_read_their_variables_as_processes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_GATEWAY_CORS_ORIGINS", '["*"]')
    monkeypatch.setenv("HEADWAY_AMQP_URL", "amqp://elsewhere/")
    async with (
        EmbeddedMesh(spec(tmp_path, initial_model=MODEL)) as mesh,
        httpx.AsyncClient(base_url=mesh.spec.gateway_url) as client,
    ):
        found = await client.get("/v1/models", headers={"origin": "https://a.example"})
    assert found.headers["access-control-allow-origin"] == "*"


async def test_settings_that_a_service_refuses_are_named(tmp_path: Path):
    """The service checks them when it starts, in a task of its own."""
    bad = msgspec.structs.replace(spec(tmp_path), planner={"leader": {"policy": "none"}})
    with pytest.raises(SettingsError, match=r"^grouper-0 ended: leader\.policy 'none' does not"):
        await EmbeddedMesh(bad).__aenter__()


async def test_kill_ends_a_service_that_ignores_its_cancellation(tmp_path: Path):
    """A loop ignores a cancellation, as `wait_for` does before Python 3.12 if its event is set."""
    mesh = EmbeddedMesh(spec(tmp_path))
    stop = mesh._stops["agent-a"] = asyncio.Event()
    under_way = asyncio.Event()

    async def serve() -> None:
        under_way.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await stop.wait()

    mesh._tasks["agent-a"] = asyncio.create_task(serve())
    await under_way.wait()
    async with asyncio.timeout(10):
        await mesh.kill("agent-a")

    assert mesh._tasks == mesh._stops == {}


NEVER_READY = """
import asyncio, signal, sys
from services.mesh import cli, mesh

async def wait_ready(*_, **__):
    await asyncio.Event().wait()

mesh.wait_ready = wait_ready
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` around the tests ignores it
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_ends_a_mesh_that_is_not_ready(tmp_path: Path, number: signal.Signals):
    """A mesh that never becomes ready, so that the signal always arrives before readiness."""
    command = [sys.executable, "-c", NEVER_READY, "up", "--broker", EMBEDDED]
    options = ["--port", str(free_port()), "--log-dir", str(tmp_path)]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "starting\n"
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "ready" not in said
