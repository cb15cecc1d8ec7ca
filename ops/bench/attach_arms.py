"""The ways in which requests reach attached servers: chosen by the client, or through the mesh."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

import psutil

from ops.bench.vllm_serve import StockServer, stock_server
from ops.ports import free_port
from ops.sim.attached.outcomes import Outcome
from services.agent.backends.base import EngineRequest
from services.agent.backends.remote.server import Server
from services.agent.backends.remote.token_run import TokenRun
from services.mesh.processes import ProcessMesh
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ReplyMode, Sampling, Tokens
from shared.models.registry import write_registry
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

NUM_SERVERS = 2
MAX_RUNNING = 16
"""Limit of each server, as its owner has set it."""
IMPORTANCE = {"Q2": Importance.LOW}
"""Importance of a class for the mesh; the same information as `PRIORITIES` for vLLM's server."""
_ids = count()


class Arm(Protocol):
    """One way to the servers."""

    async def ask(
        self, prompt: Tokens, max_tokens: int, class_name: str, slo: Slo, outcome: Outcome
    ) -> None:
        """Generate one answer, and record it in *outcome*; cancelling ends the request."""
        ...


@dataclass(slots=True, kw_only=True)
class Balanced:
    """
    A client that chooses a server for each request itself.

    Args:
        servers: The servers.
        model: Name of the model.
        least_loaded: True: the server with the fewest requests of this client; False: in turn.
        priorities: Priority of each class; None: the server orders by arrival.
    """

    servers: Sequence[Server]
    model: ModelName
    least_loaded: bool
    priorities: Mapping[str, int] | None = None
    _turn: int = 0
    _open: dict[int, int] = field(default_factory=dict)

    async def ask(
        self, prompt: Tokens, max_tokens: int, class_name: str, slo: Slo, outcome: Outcome
    ) -> None:
        request = EngineRequest(
            request_id=RequestId(f"bench-{next(_ids)}"),
            model=self.model,
            prompt=prompt,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            slo=slo,
        )
        priority = None if self.priorities is None else self.priorities[class_name]
        run = TokenRun(request, model=self.model, priority=priority, stops=())
        number = self._chosen()
        self._open[number] = self._open.get(number, 0) + 1
        try:
            async for outputs in run.outputs(self.servers[number]):
                for output in outputs:
                    outcome.add(len(output.token_ids), time.time())
                    outcome.finished |= output.finish_reason is not None
        finally:
            self._open[number] -= 1

    def _chosen(self) -> int:
        self._turn += 1
        numbers = [(self._turn + each) % len(self.servers) for each in range(len(self.servers))]
        if self.least_loaded:
            return min(numbers, key=lambda number: self._open.get(number, 0))
        return numbers[0]


@dataclass(frozen=True, slots=True)
class Meshed:
    """A producer of the mesh."""

    producer: Producer
    model: ModelName

    async def ask(
        self, prompt: Tokens, max_tokens: int, class_name: str, slo: Slo, outcome: Outcome
    ) -> None:
        body = InferenceRequest(
            model=self.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            slo=slo,
            application=class_name,
            importance=IMPORTANCE.get(class_name),
        )
        generation = await self.producer.submit(body, reply=ReplyMode.STREAM)
        try:
            async for part in generation:
                outcome.add(len(part.token_ids), time.time())
            outcome.finished = not hasattr(await generation.final(), "error")
        finally:
            await generation.cancel()


@asynccontextmanager
async def stock_servers(entry: ModelEntry, directory: Path) -> AsyncIterator[list[StockServer]]:
    """Context with the servers, which start at the same time."""
    arguments = (
        *("--model", entry.path, "--served-model-name", entry.name, "--enforce-eager"),
        *("--dtype", "float32", "--max-model-len", str(entry.max_model_len), "--block-size", "32"),
        *("--scheduling-policy", "priority", "--max-num-seqs", str(MAX_RUNNING)),
        "--no-enable-prefix-caching",
    )
    started: asyncio.Queue[StockServer] = asyncio.Queue()
    stop = asyncio.Event()

    async def run(number: int) -> None:
        async with stock_server(arguments, directory / f"serve-{number}.log") as server:
            started.put_nowait(server)
            await stop.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_SERVERS):
            group.create_task(run(number))
        try:
            yield [await started.get() for _ in range(NUM_SERVERS)]
        finally:
            stop.set()


def mesh_spec(
    broker: str, entry: ModelEntry, directory: Path, servers: Sequence[StockServer]
) -> MeshSpec:
    """A mesh in front of *servers*; without servers, a mesh with engines of its own."""
    registry = directory / f"registry-{len(servers)}.json"
    write_registry(registry, [entry])
    endpoints = directory / "endpoints"
    endpoints.write_text("\n".join(server.url for server in servers))
    if servers:
        remote = {"url": f"file:{endpoints}", "device": "cpu"}
        agents: tuple[AgentSpec, ...] = (
            AgentSpec(
                instance_id="attached",
                engine="remote",
                settings={"models": [entry.name], "engine": {"remote": remote}},
            ),
        )
    else:
        vllm = {"max_running": MAX_RUNNING, "prefix_caching": False}
        agents = tuple(
            AgentSpec(
                instance_id=f"own-{number}",
                engine="vllm",
                settings={"initial_model": entry.name, "engine": {"vllm": vllm}},
            )
            for number in range(NUM_SERVERS)
        )
    return MeshSpec(
        broker=broker,
        registry=registry,
        log_dir=directory / f"log-{len(servers)}",
        gateway_port=free_port(),
        log_level="warning",
        agents=agents,
    )


@asynccontextmanager
async def meshed(mesh: ProcessMesh, model: ModelName) -> AsyncIterator[Meshed]:
    """Context with a producer of a running mesh."""
    async with (
        mesh.open_broker("headway-bench") as broker,
        Producer(broker, name="bench", clock=SystemClock(), user_id="guest") as producer,
    ):
        yield Meshed(producer, model)


def cpu_s(pids: Sequence[int]) -> Seconds:
    """CPU time of processes and of all their children."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    return total
