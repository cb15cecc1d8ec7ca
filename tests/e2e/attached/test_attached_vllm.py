"""A mesh in front of stock `vllm serve` processes, one of which is killed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.bench.vllm_serve import stock_server
from ops.ports import free_ports
from services.mesh.processes import ProcessMesh
from services.mesh.spec import AgentSpec
from shared.contracts.base import ModelName, Seconds
from shared.contracts.models import ModelEntry
from shared.contracts.requests import RequestCompleted
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from tests.e2e.meshes import LLAMA, Answer, ask_all, mesh_spec, producer_of, request

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]
BODIES = "bodies"
"""Name of the model in the mesh whose servers read bodies."""
ENDPOINTS = "endpoints"
"""File with the addresses of the servers."""
NUM_REQUESTS = 100
"""Number of requests of each form."""
PATIENCE_S = 300.0
FLAGS = (
    *("--served-model-name", LLAMA, "other-name", "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "1024", "--block-size", "32", "--scheduling-policy", "priority"),
    *("--max-num-seqs", "16", "--no-enable-prefix-caching"),
)
"""Flags that no part of the mesh has chosen."""


class Servers:
    """
    Servers of one model on fixed ports.

    Args:
        model: Directory of the model.
        directory: Directory of their logs.
    """

    def __init__(self, model: Path, directory: Path, number: int) -> None:
        self._model = model
        self._directory = directory
        self._ports = free_ports(number)
        self._running: dict[int, tuple[asyncio.Task[None], asyncio.Event, int]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    async def start(self, *numbers: int) -> None:
        """Start servers and wait until they answer."""
        await asyncio.gather(*(self._start(number) for number in numbers))

    async def _start(self, number: int) -> None:
        started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def run() -> None:
            log = self._directory / f"serve-{number}.log"
            arguments = ("--model", str(self._model), *FLAGS)
            async with stock_server(arguments, log, port=self._ports[number]) as server:
                started.set_result(server.pid)
                await stop.wait()

        task = asyncio.create_task(run())
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        self._running[number] = task, stop, started.result()

    async def kill(self, number: int) -> None:
        """Kill all processes of a server."""
        task, stop, pid = self._running.pop(number)
        os.killpg(pid, signal.SIGKILL)
        stop.set()
        await task

    async def close(self) -> None:
        for task, stop, _ in self._running.values():
            stop.set()
            await task


@asynccontextmanager
async def attached(broker: str, directory: Path) -> AsyncIterator[tuple[Servers, ProcessMesh]]:
    """
    Two of three servers, and a mesh that serves one model in tokens and one in bodies with both.
    """
    models = ModelRegistry.load(make_tiny_models(directory / "models", weights=True))
    tokens = models.entry(ModelName(LLAMA))
    registry = directory / "attached.json"
    taken = ModelEntry(name=ModelName(BODIES), takes="bodies", max_model_len=1024)
    write_registry(registry, [msgspec.structs.replace(tokens, max_model_len=1024), taken])
    servers = Servers(Path(tokens.path), directory, 3)
    endpoints = directory / ENDPOINTS
    endpoints.write_text("\n".join(servers.urls[:2]))

    def agent(name: str) -> AgentSpec:
        remote = {"url": f"file:{endpoints}", "model": LLAMA, "shared": True}
        return AgentSpec(
            instance_id=f"attached-{name}",
            engine="remote",
            settings={"models": [name], "engine": {"remote": remote}, "drain_timeout_s": 2.0},
        )

    spec = mesh_spec(broker, directory, registry=registry, agents=0)
    spec = msgspec.structs.replace(spec, agents=(agent(LLAMA), agent(BODIES)))
    try:
        await servers.start(0, 1)
        async with ProcessMesh(spec, ready_timeout_s=PATIENCE_S) as mesh:
            yield servers, mesh
    finally:
        await servers.close()


def requests_for(model: str) -> list[Any]:
    return [request(n, model=model, max_tokens=40 + n % 40) for n in range(NUM_REQUESTS)]


async def answers(
    producer: Producer, bodies: Sequence[Any], on_sent: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    return await ask_all(producer, bodies, spacing_s=0.03, on_sent=on_sent, timeout_s=PATIENCE_S)


def used(served: Sequence[Answer]) -> set[str]:
    """Ports of the servers that have completed the answers."""
    return {answer.final.instance_id.rpartition("-")[2] for answer in served}  # type: ignore[union-attr]  # completed


async def used_after_s(producer: Producer, url: str) -> Seconds:
    """Time until the server at *url* has completed an answer, under a steady load."""
    begun = time.monotonic()
    port = url.rpartition(":")[2]
    found = asyncio.Event()

    async def ask() -> None:
        while not found.is_set():
            (answer,) = await ask_all(producer, [request(0, max_tokens=8)], timeout_s=PATIENCE_S)
            if port in used([answer]):
                found.set()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(ask() for _ in range(12)))
    return time.monotonic() - begun


async def test_killed_server_loses_no_request_and_all_servers_are_used(
    vllm_broker: str, tmp_path: Path
) -> None:
    async with (
        attached(vllm_broker, tmp_path) as (servers, mesh),
        producer_of(mesh) as producer,
    ):
        calm = await answers(producer, requests_for(LLAMA))
        under_way = asyncio.Event()

        async def havoc() -> None:
            await under_way.wait()
            await servers.kill(1)

        chaos = asyncio.create_task(havoc(), name="havoc")
        storm, storm_of_bodies = await asyncio.gather(
            answers(producer, requests_for(LLAMA), lambda n: under_way.set() if n > 40 else None),
            answers(producer, requests_for(BODIES)),
        )
        await chaos
        await servers.start(1)
        again_s = await used_after_s(producer, servers.urls[1])
        await servers.start(2)
        (tmp_path / ENDPOINTS).write_text("\n".join(servers.urls))
        third_s = await used_after_s(producer, servers.urls[2])
        print(f"used after {again_s:.1f} s (back), {third_s:.1f} s (third)")
        again = await answers(producer, requests_for(LLAMA))

    everything = (*calm, *storm, *storm_of_bodies, *again)
    assert {RequestCompleted} == {type(answer.final) for answer in everything}
    # Greedy answers continue elsewhere with the same tokens.
    expected = [answer.token_ids for answer in calm]
    assert expected == [answer.token_ids for answer in storm]
    assert expected == [answer.token_ids for answer in again]
    assert expected == [answer.streamed or answer.token_ids for answer in storm]
    lengths = [answer.final.usage.completion_tokens for answer in storm_of_bodies]  # type: ignore[union-attr]  # completed
    assert lengths == [len(tokens) for tokens in expected]
    assert any(answer.final.attempts.hop for answer in storm)  # type: ignore[union-attr]  # completed
    ports = [url.rpartition(":")[2] for url in servers.urls]
    assert used(calm) == set(ports[:2])
    assert used(again) == set(ports)
