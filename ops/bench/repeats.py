"""
Benchmark of ids that mean something.

Every id is published three times, over AMQP or over HTTP, to three groupers and two gateways: twice
at random times, so that repeats meet requests in progress, and once after a restart of the broker.
Each id must run once, and every publication gets the same answer. Then the broker restarts under
load: the answers must still be equal, and the number of second runs is a figure.
"""

import asyncio
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from ops.bench.meshes import MODEL, simulated_agent
from ops.bench.result import Line, Result, quantiles_ms
from ops.broker import PrivateNode, rabbitmq_binary
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import MeshProcess, ProcessMesh
from services.mesh.spec import MeshSpec
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Delivery, QueueSpec, QueueType, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import SettingsError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.contracts.tenants.usage import RequestMetered
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from shared.runtime.tasks import poll_until
from shared.store.location import location_of
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings

TIMES = 3
RATE_RPS = 60.0
"""Publications per second."""
TENANT = "acme"
STATUS_P99_MS = 50.0
RETRY_S = 0.5
GIVE_UP_S = 120.0
START_S = 60.0
METERED = "bench-metered"
_decode: Decoder[RequestMetered] = Decoder(RequestMetered)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on a private RabbitMQ node, which it restarts."""
    del broker  # another broker could not be restarted
    if rabbitmq_binary("rabbitmq-server") is None:
        raise SettingsError("this benchmark restarts its broker: install rabbitmq-server")
    ids = [f"id-{number:04}" for number in range(120 if quick else 1000)]
    later = [f"later-{number:04}" for number in range(60 if quick else 200)]
    random = np.random.default_rng(seed)
    result = Result(name="repeats", seed=seed, quick=quick)
    async with _mesh() as rig, _doors(rig) as doors:
        await _publish(doors, random.permutation(ids * (TIMES - 1)).tolist())
        await asyncio.to_thread(rig.node.stop)
        await asyncio.to_thread(rig.node.start)
        await _publish(doors, random.permutation(ids).tolist())
        status_s = await _statuses(rig, ids)
        order = random.permutation(later * TIMES).tolist()
        restart = asyncio.create_task(_restart(rig.node, after_s=len(order) / RATE_RPS / 2))
        await _publish(doors, order)
        await restart
        await poll_until(lambda: rig.num_runs(ids + later)[0] >= len(ids + later), timeout_s=30.0)
    runs, second = rig.num_runs(ids)
    num_answers, unequal = rig.num_answers(ids)
    _, second_later = rig.num_runs(later)
    num_later, unequal_later = rig.num_answers(later)
    result.figures |= {
        "ids": len(ids),
        "answers": num_answers,
        "runs": runs,
        "HTTP requests that were sent again": rig.retries,
        "status": quantiles_ms(status_s),
        "ids while the broker restarts under load": len(later),
        "their second runs": second_later,
    }
    expected = TIMES * (len(ids) + len(later))
    missing = expected - num_answers - num_later + unequal + unequal_later
    result.lines += [
        Line(name="second runs", value=float(second), bound=0.0),
        Line(
            name=f"publications of {expected} without an equal answer",
            value=float(missing),
            bound=0.0,
        ),
        Line(
            name="p99 of GET /v1/requests/{id}, ms",
            value=1000 * float(np.quantile(status_s, 0.99)),
            bound=STATUS_P99_MS,
        ),
    ]
    return result


@dataclass(slots=True)
class _Rig:
    node: PrivateNode
    mesh: ProcessMesh
    urls: tuple[str, str]
    """Both gateways."""
    answers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    metered: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))
    """Request id -> times at which runs of it have ended."""
    http_ids: dict[str, str] = field(default_factory=dict)
    """Id of a request in the mesh -> key over HTTP of which it was made."""
    retries: int = 0

    def num_runs(self, ids: Sequence[str]) -> tuple[int, int]:
        """Number of runs of *ids* that have ended, and of those that were not the first."""
        known = {self.http_ids.get(each, each): len(ends) for each, ends in self.metered.items()}
        ends = [known[request_id] for request_id in ids if request_id in known]
        return sum(ends), sum(ends) - len(ends)

    def num_answers(self, ids: Sequence[str]) -> tuple[int, int]:
        """Number of answers under *ids*, and of ids whose answers differ."""
        answers = [self.answers[request_id] for request_id in ids]
        return sum(map(len, answers)), sum(len(set(each)) != 1 for each in answers)


@dataclass(slots=True)
class _Doors:
    """Clients of a mesh."""

    rig: _Rig
    http: httpx.AsyncClient
    producers: list[Producer]


@contextlib.asynccontextmanager
async def _mesh() -> AsyncIterator[_Rig]:
    """Three groupers, two gateways and two instances on one store, and a private broker."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        node = PrivateNode(root / "node")
        node.start()
        try:
            async with _mesh_on(node, root) as rig:
                yield rig
        finally:
            node.close()


@contextlib.asynccontextmanager
async def _mesh_on(node: PrivateNode, root: Path) -> AsyncIterator[_Rig]:
    settings = StoreSettings(data_dir=str(root / "data"))
    if (location := location_of(settings)) is not None:
        await migrate(location, timeout_s=60.0)
    store: dict[str, Any] = msgspec.to_builtins(settings)
    spec = MeshSpec(
        broker=node.url,
        registry=make_tiny_models(root / "models", weights=False),
        log_dir=root / "log",
        gateway_port=free_port(),
        gateway={"api_keys": {TENANT: TENANT}, "store": store},
        planner={"store": store},
        log_level="warning",
        agents=tuple(simulated_agent(f"a{n}", SimulatedSettings()) for n in range(2)),
        groupers=3,
    )
    async with ProcessMesh(spec) as mesh:
        _, of_gateway = spec.service_settings()["gateway"]
        port = free_port()
        second = MeshProcess(
            "gateway-2", service="gateway", settings=of_gateway | {"port": port}, directory=root
        )
        await second.start()
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(url)
            yield _Rig(node, mesh, (spec.gateway_url, url))
        finally:
            await second.stop()


async def _until_ready(url: str) -> None:
    """
    Wait until a gateway serves.

    Raises:
        TimeoutError: It does not in time.
    """
    headers = {"authorization": f"Bearer {TENANT}"}
    async with asyncio.timeout(START_S), httpx.AsyncClient(headers=headers) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/v1/models")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _doors(rig: _Rig) -> AsyncIterator[_Doors]:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=GIVE_UP_S, limits=httpx.Limits(max_connections=None))
        )
        brokers = [
            await stack.enter_async_context(rig.mesh.open_broker(f"headway-bench-{number}"))
            for number in range(TIMES)
        ]
        await _count_runs(rig, brokers[0])
        producers = [
            await stack.enter_async_context(
                Producer(
                    each,
                    name=f"bench-{number}",
                    clock=SystemClock(),
                    user_id="guest",
                    give_up_after_s=GIVE_UP_S,
                )
            )
            for number, each in enumerate(brokers)
        ]
        yield _Doors(rig, client, producers)


async def _publish(doors: _Doors, order: Sequence[str]) -> None:
    """Publish ids in this order at a steady rate, and read all answers."""
    rig = doors.rig
    async with asyncio.timeout(len(order) / RATE_RPS + GIVE_UP_S), asyncio.TaskGroup() as tasks:
        for number, request_id in enumerate(order):
            if _is_http(request_id):
                url = rig.urls[number % 2]
                tasks.create_task(_over_http(rig, doors.http, url, request_id))
            else:
                producer = doors.producers[number % TIMES]
                tasks.create_task(_over_amqp(rig, producer, request_id))
            await asyncio.sleep(1 / RATE_RPS)


def _is_http(request_id: str) -> bool:
    """Return whether an id is a key over HTTP; the others are message ids."""
    return int(request_id[-1]) % 2 == 1


async def _count_runs(rig: _Rig, broker: Any) -> None:
    """Collect what agents meter: one message for each run with a final."""
    await broker.declare_queue(QueueSpec(name=METERED, type=QueueType.CLASSIC))
    await broker.bind(
        BindingSpec(exchange=topology.TELEMETRY, queue=METERED, routing_key=topology.METERED_KEY)
    )

    async def on_metered(delivery: Delivery) -> None:
        metered = _decode(delivery.body)
        rig.metered[metered.request_id].add(metered.finished_at)
        await delivery.settle(Settlement.ACK)

    await broker.consume(METERED, on_metered, prefetch=100)


async def _restart(node: PrivateNode, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await asyncio.to_thread(node.stop)
    await asyncio.to_thread(node.start)


async def _over_amqp(rig: _Rig, producer: Producer, request_id: str) -> None:
    body = InferenceRequest(
        model=MODEL,
        prompt=f"what does {request_id} say",
        max_tokens=8,
        id=request_id,
        tenant=TENANT,
        slo=Slo(ttlt_s=300.0),
    )
    generation = await producer.submit(body, reply=ReplyMode.FINAL, digest=request_id)
    final = await generation.final()
    if isinstance(final, RequestCompleted):
        rig.answers[request_id].append(str(final.token_ids))


async def _over_http(rig: _Rig, client: httpx.AsyncClient, url: str, request_id: str) -> None:
    """Ask until there is an answer, as a client with a key does."""
    body = {
        "model": MODEL,
        "prompt": f"what does {request_id} say",
        "max_tokens": 8,
        "slo": {"ttlt_s": 300.0},
    }
    headers = {"authorization": f"Bearer {TENANT}", "idempotency-key": request_id}
    until = time.monotonic() + GIVE_UP_S
    while time.monotonic() < until:
        try:
            answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == httpx.codes.OK:
            made = answer.json()
            rig.answers[request_id].append(f"{made['id']} {made['choices'][0]['text']}")
            rig.http_ids[answer.headers["x-headway-request-id"]] = request_id
            return
        rig.retries += 1
        await asyncio.sleep(RETRY_S)


async def _statuses(rig: _Rig, ids: Sequence[str]) -> list[float]:
    """Times of questions about the requests, one after the other at both gateways."""
    times = []
    headers = {"authorization": f"Bearer {TENANT}"}
    async with httpx.AsyncClient(timeout=30.0, headers=headers) as client:
        for number, request_id in enumerate(ids):
            if _is_http(request_id):
                continue
            url = rig.urls[number // 2 % 2]
            begun = time.perf_counter()
            answer = await client.get(f"{url}/v1/requests/{request_id}")
            times.append(time.perf_counter() - begun)
            answer.raise_for_status()
    return times
