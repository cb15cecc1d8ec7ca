"""A mesh that serves batches, and load beside them."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ops.bench.meshes import MODEL, simulated_agent
from ops.broker import PrivateNode, rabbitmq_binary
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.mesh.spec import MeshSpec
from shared.contracts.errors import CapacityError, SettingsError, TransientError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import ReplyMode
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from shared.store.location import location_of
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LEASE_S = 3.0
GIVE_UP_S = 1800.0


@dataclass(slots=True)
class Rig:
    node: PrivateNode
    mesh: ProcessMesh
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def batch_mesh(engine: SimulatedSettings, url: str | None = None) -> AsyncIterator[Rig]:
    """
    Two instances with one of each other service, on one store and a private broker.

    Args:
        engine: Engine of both instances.
        url: Database of the store; default: SQLite.

    Raises:
        SettingsError: RabbitMQ is not installed.
    """
    if rabbitmq_binary("rabbitmq-server") is None:
        raise SettingsError("benchmarks of batches restart their broker: install rabbitmq-server")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        node = PrivateNode(root / "node")
        node.start()
        try:
            settings = StoreSettings(url=url, data_dir=str(root / "data"))
            if (location := location_of(settings)) is not None:
                await migrate(location, timeout_s=60.0)
            store: dict[str, Any] = msgspec.to_builtins(settings)
            batches = {"lease_s": LEASE_S, "max_running": 32}
            spec = MeshSpec(
                broker=node.url,
                registry=make_tiny_models(root / "models", weights=False),
                log_dir=root / "log",
                gateway_port=free_port(),
                gateway={"store": store, "batches": batches},
                planner={"store": store},
                log_level="warning",
                agents=tuple(simulated_agent(f"a{n}", engine) for n in range(2)),
            )
            async with (
                ProcessMesh(spec) as mesh,
                httpx.AsyncClient(base_url=spec.gateway_url, timeout=60.0) as http,
            ):
                yield Rig(node, mesh, http)
        finally:
            node.close()


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": f"what does line {number} say about this",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def lines_of(num_lines: int, max_tokens: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": body_of(number, max_tokens),
            }
        ).encode()
        + b"\n"
        for number in range(num_lines)
    )


async def create(rig: Rig, content: bytes, window: str) -> str:
    file = await rig.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
    )
    file.raise_for_status()
    asked = {
        "input_file_id": file.json()["id"],
        "endpoint": ENDPOINT,
        "completion_window": window,
    }
    batch = await rig.http.post("/v1/batches", json=asked)
    batch.raise_for_status()
    return str(batch.json()["id"])


async def polled(rig: Rig, batch_id: str) -> AsyncIterator[dict[str, Any]]:
    """The batch, several times a second until it has ended; nothing while no gateway answers."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await rig.http.get(f"/v1/batches/{batch_id}")
            if answer.status_code == httpx.codes.OK:
                batch = answer.json()
                yield batch
                if batch["status"] in ENDED:
                    return
        await asyncio.sleep(0.25)


async def ended(rig: Rig, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    async with asyncio.timeout(GIVE_UP_S):
        async for batch in polled(rig, batch_id):  # noqa: B007 - the last one counts
            pass
    return batch


async def custom_ids(rig: Rig, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    content = await rig.http.get(f"/v1/files/{file_id}/content")
    return [json.loads(line)["custom_id"] for line in content.content.splitlines()]


Load = Callable[[Producer], AsyncIterator[None]]
"""Publishes requests until it is closed; yields after each."""


@contextlib.asynccontextmanager
async def loaded(rig: Rig, *loads: Load) -> AsyncIterator[None]:
    """Context with other load; its answers are not waited for."""
    async with producer_of(rig) as producer:
        tasks = [asyncio.create_task(_drive(load(producer))) for load in loads]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _drive(load: AsyncIterator[None]) -> None:
    async for _ in load:
        pass


async def ask(producer: Producer, **fields: Any) -> None:
    request = InferenceRequest(**(body_of(0, 32) | fields))
    with contextlib.suppress(CapacityError, TransientError):  # while the broker restarts
        await producer.submit(request, reply=ReplyMode.FINAL)


@contextlib.asynccontextmanager
async def producer_of(rig: Rig) -> AsyncIterator[Producer]:
    async with (
        rig.mesh.open_broker("headway-bench") as broker,
        Producer(
            broker, name="bench", clock=SystemClock(), user_id="guest", give_up_after_s=60.0
        ) as producer,
    ):
        yield producer
