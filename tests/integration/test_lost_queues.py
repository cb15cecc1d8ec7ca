"""A mesh whose broker loses queues while it runs."""

import asyncio
from pathlib import Path

import httpx
import pytest

from services.mesh.embedded import EmbeddedMesh
from shared.broker import topology
from tests.brokers import eventually
from tests.e2e.meshes import LLAMA, mesh_spec

pytestmark = pytest.mark.slow
BODY = {"model": LLAMA, "prompt": "hello", "max_tokens": 4}


@pytest.mark.parametrize("queue", [topology.GLOBAL_INTERACTIVE, topology.GLOBAL_REST])
async def test_requests_are_served_again_after_their_global_queue_was_deleted(
    tmp_path: Path, queue: str
):
    async with (
        EmbeddedMesh(mesh_spec("embedded", tmp_path)) as mesh,
        mesh.open_broker("test") as broker,
        httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=60.0) as http,
    ):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await broker.delete_queue(queue)

        async def is_served() -> bool:
            answers = await asyncio.gather(
                http.post("/v1/completions", json=BODY | {"slo": {"ttft_s": 5}}),
                http.post("/v1/completions", json=BODY | {"slo": {}}),
            )
            return all(answer.status_code == 200 for answer in answers)

        await eventually(is_served, within_s=10.0)
