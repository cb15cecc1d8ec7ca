"""
Benchmark of a mesh on a cluster of three RabbitMQ nodes, of which each is killed once under load.

Requests arrive at a steady rate, half of them over AMQP and half over HTTP, while one node after
another is killed with SIGKILL, stays away, and is started again. Each request must get one final.
A stall is a time without any final of one door, while a request of this door is outstanding.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from ops.bench.meshes import MODEL, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.broker import PrivateCluster
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.mesh.spec import MeshSpec
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

RATE_RPS = 10.0
"""Requests per second of both doors together."""
MAX_TOKENS = 40
NUM_AGENTS = 2
CALM_S: Seconds = 5.0
"""Time before each kill, with all nodes."""
AWAY_S: Seconds = 6.0
"""Time between the kill of a node and its start."""
LIMIT_S: Seconds = 120.0
"""Time after which a request without a final counts as lost."""
MOST_STALL_S: Seconds = 20.0
DOORS = ("AMQP", "HTTP")
ENGINE = SimulatedSettings(
    latency=LatencyCoefficients(constant_s=0.008, linear_s=4e-5, context_s=2e-7), max_running=24
)
SLOS: tuple[Slo, ...] = (Slo(ttft_s=5.0, tbt_s=1.0), Slo(ttlt_s=60.0), Slo())
SERVICE_UNAVAILABLE = 503


@dataclass(slots=True)
class Seen:
    """What the clients of one door have seen."""

    begun: dict[int, float] = field(default_factory=dict)
    """Number of a request -> time at which it was sent first."""
    ended: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of each final."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> number of refusals, after which a client has sent its request again."""
    errors: Counter[str] = field(default_factory=Counter)
    """Code -> number of finals with this error."""
    unlike: int = 0
    """Number of streams that differ from their final."""

    def longest_stall_s(self) -> Seconds:
        """Longest time without a final while a request was outstanding."""
        steps = sorted([(at, 1) for at in self.begun.values()] + [(at, -1) for at, _ in self.ended])
        longest, outstanding, since = 0.0, 0, 0.0
        for at, change in steps:
            if outstanding and change < 0:
                longest = max(longest, at - since)
            if change < 0 or not outstanding:
                since = at
            outstanding += change
        return longest

    def slowest_s(self) -> Seconds:
        """Longest time from a request to its final."""
        return max((at - self.begun[number] for at, number in self.ended), default=0.0)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """
    Run the benchmark on a private cluster; a quick run kills only the node that all clients use.

    Args:
        seed: Seed of the order in which the nodes are killed.
        quick: Selects the small form.
        broker: Ignored: another broker could not be killed.
    """
    del broker
    if quick:
        return await lost_nodes(num_requests=240, kills=(0,), seed=seed)
    order = np.random.default_rng(seed).permutation(3)
    return await lost_nodes(num_requests=1200, kills=tuple(map(int, order)), seed=seed)


async def lost_nodes(*, num_requests: int, kills: tuple[int, ...], seed: int) -> Result:
    """
    Serve *num_requests* while nodes are killed, one after another.

    Args:
        num_requests: Number of requests of both doors together.
        kills: Numbers of the nodes to kill, in order. All clients begin with node 0.
        seed: Named in the result.
    """
    result = Result(name="lost_nodes", seed=seed, quick=len(kills) == 1)
    with tempfile.TemporaryDirectory(prefix="headway-nodes-") as directory:
        root = Path(directory)
        cluster = PrivateCluster(root / "broker")
        begun_at = time.monotonic()
        await asyncio.to_thread(cluster.start)
        result.figures["start of the cluster, s"] = round(time.monotonic() - begun_at, 1)
        try:
            async with _doors(root, cluster.url) as (producer, http):
                killing = asyncio.create_task(_kill_each(cluster, kills), name="kills")
                doors = {door: Seen() for door in DOORS}
                await asyncio.gather(
                    *(
                        _ask(number, producer, http, doors[DOORS[number % 2]])
                        for number in range(num_requests)
                    )
                )
                result.figures["nodes away, s"] = await killing
        finally:
            await asyncio.to_thread(cluster.close)
    for door, seen in doors.items():
        _report(result, door, seen, num_requests // 2)
    return result


def _report(result: Result, door: str, seen: Seen, expected: int) -> None:
    finals = Counter(number for _, number in seen.ended)
    stall_s = round(seen.longest_stall_s(), 2)
    result.figures |= {
        f"{door}: finals": len(finals),
        f"{door}: longest stall, s": stall_s,
        f"{door}: slowest answer, s": round(seen.slowest_s(), 2),
        f"{door}: refused and sent again": dict(seen.refused),
        f"{door}: errors": dict(seen.errors),
    }
    result.lines += [
        Line(name=f"{door}: without a final, of {expected}", value=expected - len(finals), bound=0),
        Line(name=f"{door}: errors", value=seen.errors.total(), bound=0),
        Line(name=f"{door}: doubled", value=len(seen.ended) - len(finals), bound=0),
        Line(name=f"{door}: streams unlike their final", value=seen.unlike, bound=0),
        Line(name=f"{door}: longest stall, s", value=stall_s, bound=MOST_STALL_S),
    ]


@asynccontextmanager
async def _doors(root: Path, url: str) -> AsyncIterator[tuple[Producer, httpx.AsyncClient]]:
    """A mesh on the broker at *url*, and a client of each door."""
    spec = MeshSpec(
        broker=url,
        registry=make_tiny_models(root / "models", weights=False),
        log_dir=root / "log",
        gateway_port=free_port(),
        log_level="warning",
        agents=tuple(simulated_agent(f"a{number}", ENGINE) for number in range(NUM_AGENTS)),
        groupers=2,
        leaders=2,
    )
    async with (
        ProcessMesh(spec) as mesh,
        mesh.open_broker("headway-bench") as broker,
        Producer(
            broker, name="bench", clock=SystemClock(), user_id="guest", give_up_after_s=LIMIT_S
        ) as producer,
        httpx.AsyncClient(
            base_url=spec.gateway_url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)
        ) as http,
    ):
        yield producer, http
        if ended := mesh.ended():
            raise MeshError(f"processes have ended: {ended}")


async def _kill_each(cluster: PrivateCluster, kills: tuple[int, ...]) -> list[float]:
    """Kill one node after another; return how long each took until it was a member again."""
    away = []
    for number in kills:
        node = cluster.nodes[number]
        await asyncio.sleep(CALM_S)
        begun_at = time.monotonic()
        await asyncio.to_thread(node.kill)
        say(f"node {number} is killed")
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(node.start)
        await asyncio.to_thread(cluster.await_joined, node)
        away.append(round(time.monotonic() - begun_at, 1))
        say(f"node {number} is back after {away[-1]} s")
    return away


async def _ask(number: int, producer: Producer, http: httpx.AsyncClient, seen: Seen) -> None:
    """Send one request at its time, again after each refusal, and note its final."""
    await asyncio.sleep(number / RATE_RPS)
    seen.begun[number] = time.monotonic()
    try:
        async with asyncio.timeout(LIMIT_S):
            if number % 2:
                await _over_http(number, http, seen)
            else:
                await _over_amqp(number, producer, seen)
    except TimeoutError:
        return
    seen.ended.append((time.monotonic(), number))


async def _over_amqp(number: int, producer: Producer, seen: Seen) -> None:
    body = InferenceRequest(
        model=MODEL,
        prompt=_prompt(number),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        slo=SLOS[number // 2 % len(SLOS)],
    )
    is_streamed = number % 4 == 0
    while True:
        try:
            mode = ReplyMode.STREAM if is_streamed else ReplyMode.FINAL
            generation = await producer.submit(body, reply=mode)
            break
        except MeshError as error:
            seen.refused[type(error).__name__] += 1
            await asyncio.sleep(1.0)
    streamed = [token async for part in generation for token in part.token_ids]
    final = await generation.final()
    if not isinstance(final, RequestCompleted):
        seen.errors[final.error.code] += 1
    elif is_streamed and tuple(streamed) != final.token_ids:
        seen.unlike += 1


async def _over_http(number: int, http: httpx.AsyncClient, seen: Seen) -> None:
    body = {
        "model": MODEL,
        "prompt": _prompt(number),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": number % 4 == 1,
    }
    while True:
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code != SERVICE_UNAVAILABLE:
            break
        seen.refused[answer.json()["error"]["code"]] += 1
        await asyncio.sleep(float(answer.headers.get("retry-after", 1.0)))
    if not answer.is_success:
        seen.errors[str(answer.status_code)] += 1
    elif body["stream"] and not answer.text.rstrip().endswith("[DONE]"):
        seen.errors["cut"] += 1


def _prompt(number: int) -> str:
    return f"request {number} asks for a long and steady answer " * (1 + number % 5)
