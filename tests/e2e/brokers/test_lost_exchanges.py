"""A mesh of processes whose broker loses exchanges while it runs."""

import asyncio
import time
from pathlib import Path

import aiormq
import httpx
import pytest

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from tests.brokers import eventually
from tests.e2e.meshes import LLAMA, mesh_spec

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]
TARGETS = ({"ttft_s": 30}, {"ttlt_s": 60}, {})
WITHIN_S = 30.0
"""Time for all exchanges to work again; 5 s on a quiet machine."""


async def test_requests_are_served_again_after_an_exchange_was_deleted(
    rabbit_url: str, tmp_path: Path
):
    async with (
        ProcessMesh(mesh_spec(rabbit_url, tmp_path)) as mesh,
        httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=5.0) as http,
    ):

        async def is_served() -> bool:
            bodies = [{"model": LLAMA, "prompt": "a", "max_tokens": 3, "slo": s} for s in TARGETS]
            try:
                answers = await asyncio.gather(
                    *(http.post("/v1/completions", json=body) for body in bodies)
                )
            except httpx.TimeoutException:
                return False
            return all(answer.status_code == 200 for answer in answers)

        await eventually(is_served, within_s=WITHIN_S)
        connection = await aiormq.connect(rabbit_url)
        channel = await connection.channel()
        for exchange in topology.EXCHANGES:
            await channel.exchange_delete(exchange.name)
            began = time.monotonic()
            await eventually(is_served, within_s=WITHIN_S)
            print(f"{exchange.name}: served again after {time.monotonic() - began:.1f} s")
        await connection.close()
