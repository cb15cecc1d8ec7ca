"""A gateway process that is frozen for seconds, as on a busy or suspended host."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from yarl import URL

from ops.ports import free_port
from services.mesh.processes import MeshProcess
from shared.models.tiny import make_tiny_models
from tests.brokers import RabbitRig, eventually
from tests.integration.gateway_rig import FakeMesh, Request, answer
from tests.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]

BODY = json.dumps({"model": "tiny-llama", "prompt": "hello", "max_tokens": 4}).encode()
FROZEN_S = 7.0
"""
Duration of a freeze; longer than the 5 s limit of a confirmed publish and than typical HTTP
keep-alive times.
"""


@dataclass(frozen=True)
class Rig:
    """A gateway process, its connection to the broker, and the mesh behind it."""

    process: MeshProcess
    port: int
    proxy: TcpProxy
    mesh: FakeMesh

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Freeze the process for `FROZEN_S`, beginning while the process waits."""
        # A wait that is interrupted this way reports timers before sockets, which is the worst
        # case.
        await asyncio.sleep(0.5)
        self.process.signal(signal.SIGSTOP)
        try:
            yield
            await asyncio.sleep(FROZEN_S)
        finally:
            self.process.signal(signal.SIGCONT)


@pytest.fixture
async def rig(rabbit_rig: RabbitRig, tmp_path: Path) -> AsyncIterator[Rig]:
    mesh = FakeMesh(await rabbit_rig.connect("fake mesh"))
    await mesh.start()
    registry = make_tiny_models(tmp_path / "models", weights=False)
    url, port = URL(rabbit_rig.url), free_port()
    async with TcpProxy(url.host or "127.0.0.1", url.port or 5672) as proxy:
        settings = {
            "registry": str(registry),
            "port": port,
            "amqp_url": str(url.with_host("127.0.0.1").with_port(proxy.port)),
        }
        process = MeshProcess("gateway", service="gateway", settings=settings, directory=tmp_path)
        await process.start()
        try:
            await eventually(lambda: ready(process, port), within_s=120.0)
            yield Rig(process, port, proxy, mesh)
        finally:
            await process.stop()


async def ready(process: MeshProcess, port: int) -> bool:
    assert process.running, process.last_lines()
    async with httpx.AsyncClient() as http:
        try:
            return (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
        except httpx.TransportError:
            return False


class Kept:
    """A kept-alive connection that is written to without checking if the peer closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def ask(self) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n"
        self._writer.write(head.encode() + BODY)

    async def status(self) -> int:
        """Read the next answer in full; return its status."""
        async with asyncio.timeout(60):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = head.partition("content-length: ")[2].partition("\r")[0]
            await self._reader.readexactly(int(length))
        return int(head.split()[1])

    async def ended(self) -> bool:
        async with asyncio.timeout(60):
            return await self._reader.read() == b""


@asynccontextmanager
async def kept_open(port: int) -> AsyncIterator[Kept]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Kept(reader, writer)
    finally:
        writer.close()


async def test_a_request_sent_during_the_freeze_is_answered(rig: Rig):
    async with kept_open(rig.port) as kept:
        kept.ask()
        assert await kept.status() == 200
        async with rig.frozen():
            kept.ask()

        assert await kept.status() == 200


async def test_a_publish_confirmed_during_the_freeze_is_not_given_up(rig: Rig):
    seen = asyncio.Event()

    async def answer_later(request: Request) -> None:
        seen.set()
        await rig.proxy.answering.wait()
        await answer(request)

    async with kept_open(rig.port) as kept:
        kept.ask()
        assert await kept.status() == 200  # from here on, the gateway's channel is open
        rig.mesh.script = answer_later
        rig.proxy.answering.clear()
        kept.ask()
        await asyncio.wait_for(seen.wait(), 4.0)
        async with rig.frozen():
            rig.proxy.answering.set()

        assert await kept.status() == 200
    assert not rig.mesh.cancelled


async def test_idle_connections_do_not_delay_shutdown(rig: Rig):
    async with kept_open(rig.port) as kept:
        kept.ask()
        assert await kept.status() == 200
        began_at = time.monotonic()
        await rig.process.stop()

        assert await kept.ended()
    assert time.monotonic() - began_at < 20.0
