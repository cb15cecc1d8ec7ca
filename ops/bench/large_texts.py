"""
Benchmark of texts that are far too long: how soon they are refused, and at whose cost.

A burst of them comes over HTTP and over AMQP, while short streams run beside it. The texts are 950
times as long as the model's context.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from ops.bench.meshes import MODEL, bench_mesh, bench_producer, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from shared.contracts.base import Seconds
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import ReplyMode, RequestFailed
from shared.producer.producer import Producer

TEXT = "a " * 1_950_000
ABOUT = {"model": MODEL, "max_tokens": 1}
LONG_PROMPT = msgspec.json.encode(ABOUT | {"prompt": TEXT})
MANY_MESSAGES = msgspec.json.encode(
    ABOUT | {"messages": [{"role": "user", "content": "hi"}] * 90_000}
)
NUM_HTTP, NUM_AMQP = 8, 4
BEFORE_S, AFTER_S = 3.0, 2.0
"""Time for which streams run before and after the bursts."""
STREAM_PERIOD_S, SAMPLE_S = 0.1, 0.02
MOST_REFUSAL_S, MOST_MIB, MOST_FIRST_S = 0.5, 200.0, 1.0


@dataclass(slots=True)
class Beside:
    """What was measured while the texts came."""

    first_s: list[Seconds] = field(default_factory=list)
    """Times to the first token of the short streams."""
    before_mib: float = 0.0
    most_mib: float = 0.0


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run is the same."""
    result = Result(name="large_texts", seed=seed, quick=quick)
    refusals: list[Seconds] = []
    agent = simulated_agent("agent-0", SimulatedSettings())
    async with (
        bench_mesh(broker, (agent,)) as mesh,
        bench_producer(mesh) as producer,
        httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=120.0) as http,
        _beside(mesh, http) as beside,
    ):
        bursts = {
            "long prompts": lambda: _refused(http, "completions", LONG_PROMPT),
            "many messages": lambda: _refused(http, "chat/completions", MANY_MESSAGES),
            "long prompts over AMQP": lambda: _refused_final(producer),
        }
        for name, refused in bursts.items():
            number = NUM_AMQP if "AMQP" in name else NUM_HTTP
            took_s = await _burst(refused, number)
            refusals += took_s
            result.figures[f"{name}: longest refusal, s"] = round(max(took_s), 3)
            say(f"{name}: {[round(each, 3) for each in took_s]}")
    mib = beside.most_mib - beside.before_mib
    first_s = _p99(beside.first_s)
    result.figures |= {
        "memory above before, MiB": round(mib, 1),
        "p99 of first tokens beside, s": round(first_s, 3),
        "streams beside": len(beside.first_s),
    }
    result.lines += [
        Line(name="longest refusal, s", value=max(refusals), bound=MOST_REFUSAL_S),
        Line(name="memory of all services above before, MiB", value=mib, bound=MOST_MIB),
        Line(name="p99 of first tokens beside, s", value=first_s, bound=MOST_FIRST_S),
    ]
    return result


async def _burst(refused: Callable[[], Awaitable[Seconds]], number: int) -> list[Seconds]:
    return list(await asyncio.gather(*(refused() for _ in range(number))))


async def _refused(http: httpx.AsyncClient, path: str, body: bytes) -> Seconds:
    """Time until the gateway refuses a request."""
    began_at = time.monotonic()
    headers = {"content-type": "application/json"}
    answer = await http.post(f"/v1/{path}", content=body, headers=headers)
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text[:300]
    return time.monotonic() - began_at


async def _refused_final(producer: Producer) -> Seconds:
    """Time until a request over AMQP ends with an error."""
    began_at = time.monotonic()
    request = InferenceRequest(model=MODEL, prompt=TEXT, max_tokens=1)
    final = await (await producer.submit(request, reply=ReplyMode.FINAL)).final()
    assert isinstance(final, RequestFailed), final
    return time.monotonic() - began_at


@contextlib.asynccontextmanager
async def _beside(mesh: ProcessMesh, http: httpx.AsyncClient) -> AsyncIterator[Beside]:
    """Short streams, and the memory of all services, while the context is open."""
    beside = Beside()

    async def stream() -> None:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "stream": True}
        began_at = time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    beside.first_s.append(time.monotonic() - began_at)
                    return

    async def streams() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(stream())
                await asyncio.sleep(STREAM_PERIOD_S)

    async def samples() -> None:
        while True:
            beside.most_mib = max(beside.most_mib, _memory_mib(mesh))
            await asyncio.sleep(SAMPLE_S)

    running = [asyncio.create_task(each()) for each in (streams, samples)]
    await asyncio.sleep(BEFORE_S)
    beside.before_mib = _memory_mib(mesh)
    yield beside
    await asyncio.sleep(AFTER_S)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _memory_mib(mesh: ProcessMesh) -> float:
    """Resident memory of all services."""
    return sum(_resident_mib(process.pid) for process in mesh.processes.values())


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def _p99(values: list[Seconds]) -> Seconds:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
