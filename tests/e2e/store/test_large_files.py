"""Large files pass through a gateway process in constant memory."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from ops.ports import free_port
from services.mesh.processes import MeshProcess
from shared.models.tiny import make_tiny_models
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import is_ready
from tests.stores import migrated_settings

pytestmark = pytest.mark.rabbitmq
BLOCK = bytes(range(256)) * 1024
MIB = 2**20
MOST_GROWTH_BYTES = 16 * MIB


@asynccontextmanager
async def gateway_process(broker: str, directory: Path) -> AsyncIterator[tuple[str, int]]:
    """URL and process id of a gateway with a store."""
    store = await migrated_settings(None, directory / "data")
    port = free_port()
    process = MeshProcess(
        "gateway",
        service="gateway",
        settings={
            "amqp_url": broker,
            "registry": str(make_tiny_models(directory / "models", weights=False)),
            "port": port,
            "store": msgspec.to_builtins(store),
        },
        directory=directory,
    )
    await process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        await eventually(lambda: is_ready(process, url))
        yield url, process.pid
    finally:
        await process.stop()


def peak_bytes(pid: int) -> int:
    """Highest resident memory of a process since `reset_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


async def form_of(num_bytes: int) -> AsyncIterator[bytes]:
    """A form with a file, made as it is sent."""
    yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="large"\r\n\r\n'
    for _ in range(num_bytes // len(BLOCK)):
        yield BLOCK
    yield b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    "num_bytes", [64 * MIB, pytest.param(512 * MIB, marks=pytest.mark.slow)], ids=["64", "512"]
)
async def test_a_large_file_is_stored_and_read_in_constant_memory(
    num_bytes: int, rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
):
    headers = {"content-type": "multipart/form-data; boundary=b"}
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as broker:
        async with (
            gateway_process(broker, tmp_path) as (url, pid),
            httpx.AsyncClient(base_url=f"{url}/v1", timeout=300.0) as http,
        ):
            small = await http.post("/files", content=form_of(MIB), headers=headers)
            await http.get(f"/files/{small.json()['id']}/content")
            reset_peak(pid)
            before = peak_bytes(pid)
            made = await http.post("/files", content=form_of(num_bytes), headers=headers)
            digest, size = hashlib.sha256(), 0
            async with http.stream("GET", f"/files/{made.json()['id']}/content") as answer:
                async for part in answer.aiter_bytes():
                    digest.update(part)
                    size += len(part)
            growth = peak_bytes(pid) - before

    print(f"{num_bytes // MIB} MiB: the gateway grew by {growth / MIB:.1f} MiB")
    expected = hashlib.sha256()
    for _ in range(num_bytes // len(BLOCK)):
        expected.update(BLOCK)
    assert (made.status_code, made.json()["bytes"], size) == (200, num_bytes, num_bytes)
    assert digest.hexdigest() == expected.hexdigest()
    assert growth <= MOST_GROWTH_BYTES
