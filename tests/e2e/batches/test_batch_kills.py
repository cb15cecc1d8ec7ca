"""Batches on a real broker: no kill of a gateway loses or repeats a line."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ops.bench.postgres import PrivatePostgres
from ops.broker import PrivateNode
from services.mesh.processes import ProcessMesh
from tests.e2e.meshes import LLAMA, kill, mesh_spec
from tests.stores import migrated_settings

pytestmark = pytest.mark.rabbitmq
NUM_LINES = 1500
NUM_KILLS = 3


def a_line(number: int) -> bytes:
    body = {
        "model": LLAMA,
        "messages": [{"role": "user", "content": f"line {number}"}],
        "max_tokens": 30,
        "temperature": 0,
        "ignore_eos": True,
    }
    line = {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return json.dumps(line).encode() + b"\n"


async def created(http: httpx.AsyncClient, content: bytes, window: str = "24h") -> str:
    file = await http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
    )
    batch = await http.post(
        "/v1/batches",
        json={
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
        },
    )
    assert batch.status_code == 200, batch.text
    return str(batch.json()["id"])


async def polled(http: httpx.AsyncClient, batch_id: str) -> AsyncIterator[dict[str, Any]]:
    """The batch, again and again until it has ended; while the gateway is away, nothing."""
    while True:
        try:
            answer = await http.get(f"/v1/batches/{batch_id}")
        except httpx.TransportError:
            await asyncio.sleep(0.1)
            continue
        if answer.status_code == 200:
            yield answer.json()
            if answer.json()["status"] in ("completed", "failed", "expired", "cancelled"):
                return
        await asyncio.sleep(0.1)


async def custom_ids(http: httpx.AsyncClient, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    content = await http.get(f"/v1/files/{file_id}/content")
    return [json.loads(line)["custom_id"] for line in content.text.splitlines()]


@pytest.mark.slow
async def test_kills_of_gateways_and_restarts_of_broker_and_database_keep_every_line_once(
    node: PrivateNode, postgres: PrivatePostgres, tmp_path: Path
):
    store = await migrated_settings(postgres.url(await postgres.create()), tmp_path / "data")
    values = msgspec.to_builtins(store)
    spec = mesh_spec(
        node.url,
        tmp_path,
        planner={"store": values},
        gateway={"store": values, "batches": {"lease_s": 2.0}},
    )
    kill_at = [NUM_LINES * (number + 1) // (NUM_KILLS + 2) for number in range(NUM_KILLS + 1)]
    found: dict[str, Any] = {}
    async with (
        ProcessMesh(spec) as mesh,
        httpx.AsyncClient(base_url=spec.gateway_url, timeout=30.0) as http,
    ):
        batch_id = await created(http, b"".join(map(a_line, range(NUM_LINES))))
        async with asyncio.timeout(400.0):
            async for found in polled(http, batch_id):
                if not kill_at or found["request_counts"]["completed"] < kill_at[0]:
                    continue
                kill_at.pop(0)
                assert found["status"] == "in_progress"
                if not kill_at:
                    await asyncio.to_thread(postgres.kill)
                    await asyncio.to_thread(node.stop)
                    await asyncio.to_thread(postgres.start)
                    await asyncio.to_thread(node.start)
                    for process in mesh.processes.values():
                        if not process.running:
                            await process.start()
                    continue
                await kill(mesh, "gateway")
                await mesh.processes["gateway"].start()
        output = await custom_ids(http, found["output_file_id"])
        errors = await custom_ids(http, found["error_file_id"])

    assert not kill_at
    assert found["status"] == "completed"
    assert output == [f"c{number}" for number in range(NUM_LINES)]
    assert errors == []
