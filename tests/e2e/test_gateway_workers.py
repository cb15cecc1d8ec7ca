"""A gateway of several processes."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from ops.ports import free_port
from services.mesh.processes import MeshProcess, ProcessMesh
from shared.runtime.lifecycle import EXIT_USAGE
from tests.brokers import eventually
from tests.e2e.meshes import LLAMA

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]

WORKERS = 2
BODY = {"model": LLAMA, "prompt": "queues", "max_tokens": 4}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(mesh: ProcessMesh, port: int, tmp_path: Path) -> AsyncIterator[MeshProcess]:
    _, settings = mesh.spec.service_settings()["gateway"]
    process = MeshProcess(
        "workers",
        service="gateway",
        settings=settings | {"port": port, "workers": WORKERS, "api_keys": {}},
        directory=tmp_path,
    )
    await process.start()
    yield process
    await process.stop()


async def test_killed_worker_is_replaced_and_the_others_serve(gateway: MeshProcess, port: int):
    """The other worker serves: while the process that starts workers is stopped, it is alone."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

        async def answered() -> bool:
            try:
                return (await client.post("/v1/completions", json=BODY)).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answered)
        starter = psutil.Process(gateway.pid)
        first = await workers(gateway, WORKERS)
        gateway.signal(signal.SIGSTOP)
        try:
            await eventually(lambda: starter.status() == psutil.STATUS_STOPPED)
            first[0].send_signal(signal.SIGKILL)
            await eventually(lambda: first[0].status() == psutil.STATUS_ZOMBIE)
            await eventually(answered)
        finally:
            gateway.signal(signal.SIGCONT)
        await eventually(lambda: first[0] not in starter.children())
        second = await workers(gateway, WORKERS)
        assert first[1] in second
        assert first[0] not in second

    await gateway.stop()
    assert not any(each.is_running() for each in second)


async def test_port_of_another_process_is_an_error(mesh: ProcessMesh, tmp_path: Path):
    _, settings = mesh.spec.service_settings()["gateway"]  # its gateway does not share its port
    second = MeshProcess(
        "second", service="gateway", settings=settings | {"workers": WORKERS}, directory=tmp_path
    )
    await second.start()
    assert await second.wait() == EXIT_USAGE
    assert f"cannot listen on 127.0.0.1:{mesh.spec.gateway_port}" in second.last_lines()


async def workers(gateway: MeshProcess, number: int) -> list[psutil.Process]:
    """The processes of the workers, as soon as there are *number* of them."""
    async with asyncio.timeout(30.0):
        while True:
            found = psutil.Process(gateway.pid).children()
            if len(found) == number:
                return found
            await asyncio.sleep(0.05)
