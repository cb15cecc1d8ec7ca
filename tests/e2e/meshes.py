"""Meshes for end-to-end tests, and their requests."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from ops.ports import free_port
from services.mesh.processes import MeshProcess, ProcessMesh
from services.mesh.spec import AgentSpec, MeshSpec
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.plans import PlanPublished
from shared.contracts.qos import Slo
from shared.contracts.requests import Final, ReplyMode, RequestCompleted
from shared.models.tiny import make_tiny_models
from shared.producer.generation import Generation
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.brokers import eventually

LLAMA = "tiny-llama"
QWEN = "tiny-qwen"
SLOS = (Slo(ttft_s=5.0, tbt_s=1.0), Slo(ttlt_s=120.0), Slo())
SLOW_ENGINE = {
    "latency": {"constant_s": 0.008, "linear_s": 4e-5, "context_s": 2e-7},
    "max_running": 24,
}
"""Settings of a simulated engine whose requests last long enough to be interrupted by kills."""
QUICK_START = {"engine": {"simulated": {"cold_activation_s": 0.1}}}
"""Settings of a simulated engine that loads models soon."""
_END = re.compile(r'"event":"(request\.completed|request\.failed|run\.stopped)"')


def num_stopped(mesh: ProcessMesh) -> int:
    """Number of runs that ended because their clients left, by the logs of the agents."""
    logs = [file.read_text() for file in mesh.spec.log_dir.glob("agent-*.log")]
    lines = "\n".join(logs).splitlines()
    return sum("run.stopped" in line or '"code":"cancelled"' in line for line in lines)


def ends_of(mesh: ProcessMesh, request_id: str) -> list[str]:
    """
    Events with which agents have logged the end of a request: one if it was served once, however
    often it was requeued before.
    """
    logs = [file.read_text() for file in mesh.spec.log_dir.glob("agent-*.log")]
    lines = "\n".join(logs).splitlines()
    own = [line for line in lines if f'"request_id":"{request_id}"' in line]
    return [found[1] for line in own if (found := _END.search(line))]


def mesh_spec(
    broker: str,
    directory: Path,
    *,
    engine: str = "simulated",
    agents: int = 2,
    registry: Path | None = None,
    agent_settings: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    **fields: Any,
) -> MeshSpec:
    """A small mesh; every agent starts with tiny-llama active."""
    return MeshSpec(
        broker=broker,
        registry=registry or make_tiny_models(directory / "models", weights=engine == "vllm"),
        log_dir=directory / "log",
        gateway_port=free_port(),
        gateway=gateway or {},
        agents=tuple(
            AgentSpec(
                instance_id=f"a{number}",
                engine=engine,
                settings={"initial_model": LLAMA, "drain_timeout_s": 5.0}
                | (QUICK_START if engine == "simulated" else {})
                | (agent_settings or {}),
            )
            for number in range(agents)
        ),
        **fields,
    )


@asynccontextmanager
async def second_gateway(spec: MeshSpec, directory: Path) -> AsyncIterator[tuple[MeshProcess, str]]:
    """
    Another gateway of a mesh, and its URL; it is started, and may not be ready yet.

    The mesh may start later.
    """
    _, settings = spec.service_settings()["gateway"]
    port = free_port()
    process = MeshProcess(
        "gateway-2", service="gateway", settings=settings | {"port": port}, directory=directory
    )
    await process.start()
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        await process.stop()


async def is_ready(gateway: MeshProcess, url: str) -> bool:
    """Whether a gateway is ready; fail if its process has ended."""
    assert gateway.running, gateway.last_lines()
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"{url}/ready")).status_code == 200
        except httpx.TransportError:
            return False


async def kill(mesh: ProcessMesh, name: str) -> None:
    """Kill with SIGKILL, as the kernel's OOM killer does."""
    mesh.processes[name].signal(signal.SIGKILL)
    assert await mesh.processes[name].wait(10.0) == -signal.SIGKILL


async def leader_name(broker: Broker) -> str:
    """Process name of the leader that published the latest plan."""
    decode: Decoder[PlanPublished] = Decoder(PlanPublished)
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_plan(delivery: Delivery) -> None:
        if not found.done():
            found.set_result(decode(delivery.body).leader_id)
        await delivery.settle(Settlement.ACK)

    queue = topology.temporary_queue("watch")
    await broker.declare_queue(queue)
    await broker.bind(
        BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key="plan.#")
    )
    subscription = await broker.consume(queue.name, on_plan, prefetch=1)
    try:
        return await asyncio.wait_for(found, 15.0)
    finally:
        await subscription.cancel()


async def leader_of(mesh: ProcessMesh) -> str:
    """Name of the active leader's process."""
    async with mesh.open_broker("headway-watch") as broker:
        pid = (await leader_name(broker)).split("-")[1]
    return next(
        name
        for name, process in mesh.processes.items()
        if name.startswith("leader") and str(process.pid) == pid
    )


@asynccontextmanager
async def producer_of(mesh: ProcessMesh, name: str = "test") -> AsyncIterator[Producer]:
    """A producer on its own connection."""
    async with (
        mesh.open_broker(f"headway-{name}") as broker,
        Producer(
            broker, name=name, clock=SystemClock(), user_id="guest", give_up_after_s=60.0
        ) as producer,
    ):
        yield producer


def request(number: int, *, max_tokens: int = 60, **fields: Any) -> InferenceRequest:
    """A greedy request; equal numbers give equal requests."""
    values: dict[str, Any] = {
        "model": LLAMA,
        "prompt": f"request {number} asks for a long and steady answer " * (1 + number % 5),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "slo": SLOS[number % len(SLOS)],
    }
    return InferenceRequest(**(values | fields))


@dataclass(frozen=True, slots=True)
class Answer:
    """Parts and final of one answer, as a producer receives them."""

    streamed: tuple[int, ...]
    text: str
    final: Final

    @property
    def token_ids(self) -> tuple[int, ...]:
        assert isinstance(self.final, RequestCompleted), self.final
        return self.final.token_ids


def assert_consistent(answer: Answer) -> None:
    """Assert that the stream equals the final, with each token once."""
    assert isinstance(answer.final, RequestCompleted)
    assert answer.final.token_ids == answer.streamed
    assert answer.final.text == answer.text


async def read(generation: Generation, on_part: Callable[[], None] = lambda: None) -> Answer:
    """Read a generation to its end."""
    tokens: list[int] = []
    text = ""
    async for part in generation:
        tokens += part.token_ids
        text += part.text
        on_part()
    return Answer(tuple(tokens), text, await generation.final())


async def ask_all(
    producer: Producer,
    requests: Sequence[InferenceRequest],
    *,
    spacing_s: float = 0.0,
    on_sent: Callable[[int], None] = lambda _: None,
    on_part: Callable[[], None] = lambda: None,
    timeout_s: float = 120.0,
) -> list[Answer]:
    """Send *requests* at intervals, every second request streamed, and read all answers."""

    async def one(number: int, body: InferenceRequest) -> Answer:
        await asyncio.sleep(number * spacing_s)
        mode = ReplyMode.STREAM if number % 2 else ReplyMode.FINAL
        generation = await producer.submit(body, reply=mode)
        on_sent(number)
        return await read(generation, on_part)

    async with asyncio.timeout(timeout_s):
        return list(await asyncio.gather(*(one(n, body) for n, body in enumerate(requests))))


@asynccontextmanager
async def steady_load(
    producer: Producer, requests: Sequence[InferenceRequest], *, clients: int
) -> AsyncIterator[dict[int, Answer]]:
    """
    Context in which *requests* are sent, and sent again after the last one, every second request
    streamed. Each of the clients waits for its answer before it sends the next request, so that
    requests are unanswered for as long as the context lasts, on a machine of any speed.

    Yields:
        Number of a request, counted from 0 -> its answer. At the end of the context, all requests
        that were sent have been answered.
    """
    numbers, stop = count(), asyncio.Event()
    answers: dict[int, Answer] = {}

    async def client() -> None:
        while not stop.is_set():
            number = next(numbers)
            mode = ReplyMode.STREAM if number % 2 else ReplyMode.FINAL
            generation = await producer.submit(requests[number % len(requests)], reply=mode)
            answers[number] = await read(generation)

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(), name=f"client {number}")
        try:
            yield answers
        finally:
            stop.set()


async def only_left(
    broker: Broker, mesh: ProcessMesh, expected: dict[str, int], *, within_s: float = 60.0
) -> None:
    """
    Wait until the work queues contain exactly *expected*.

    A request's last messages and counts may arrive a little after its final.
    """
    left: dict[str, int] | BrokerUnavailableError = {}

    async def is_left() -> bool:
        nonlocal left
        try:
            left = await depths(broker, mesh)
        except BrokerUnavailableError as error:  # the machine may stall for seconds
            left = error
        return left == expected

    try:
        await eventually(is_left, within_s=within_s)
    except AssertionError as never:
        raise AssertionError(
            f"queues contain {left!r} after {within_s} s, not {expected}"
        ) from never


async def depths(broker: Broker, mesh: ProcessMesh) -> dict[str, int]:
    """Number of ready messages of every work queue."""
    from services.mesh.queues import count_queues  # noqa: PLC0415 - a slow import for few tests
    from shared.contracts.lanes import LaneLayout, inbox_name  # noqa: PLC0415 - as above
    from shared.models.registry import ModelRegistry  # noqa: PLC0415 - as above

    models = ModelRegistry.load(mesh.spec.registry).bases
    counts = await count_queues(broker, models, LaneLayout())
    soft = (
        *("headway.leader", "headway.estimator", "headway.work-queues"),
        *("headway.tenants", "headway.usage", "headway.questions", topology.CANCELS),
    )
    ready = {c.queue: c.ready for c in counts if c.queue not in soft}
    # The list of inboxes is not requested from a leader, which may have been killed.
    for inbox in (inbox_name(agent.instance_id) for agent in mesh.spec.agents):
        depth = await broker.depth(inbox)
        ready[inbox] = 0 if depth is None else depth.ready
    return {queue: count for queue, count in ready.items() if count}


def tool_registry(directory: Path) -> Path:
    """A registry of tiny models with a parser of tool calls and with compact JSON."""
    path = make_tiny_models(directory, weights=True)
    registry = json.loads(path.read_text())
    for model in registry["models"]:
        model["tool_parser"] = "hermes"
        model["engine_args"] = {
            # Without this setting models with random weights write whitespace without end.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
        }
    path.write_text(json.dumps(registry))
    return path
