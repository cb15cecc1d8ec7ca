"""
What the mesh adds to a first token: the same simulated engine, through the mesh and directly.

Arms alternate in rounds under the same Poisson arrivals; each round gives the difference of its
medians, and the best round counts, since neighbours on the machine only ever add.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from ops.bench.meshes import MODEL, bench_mesh, bench_producer, cpu_s, simulated_agent
from ops.bench.result import Line, Result, quantiles_ms
from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.mesh.processes import ProcessMesh
from shared.contracts.base import ModelName, RequestId
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted, Sampling, Timings
from shared.models.registry import ModelRegistry
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

RATE_RPS = 20.0
MAX_TOKENS = 16
PROMPT = tuple(range(20, 84))
ADDED_P50_MS = 25.0
STREAMS = 256
HOPS = ("arrived_at", "grouped_at", "pulled_at", "submitted_at", "first_token_at")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request through the mesh."""

    ttft_s: float
    sent_at: float
    seen_at: float
    timings: Timings


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Measure. Quick: fewer and shorter rounds."""
    rounds, requests = (3, 60) if quick else (5, 200)
    result = Result(name="overhead", seed=seed, quick=quick)
    settings = SimulatedSettings(max_running=STREAMS, kv_capacity_tokens=1 << 20)
    async with bench_mesh(broker, (simulated_agent("bench", settings),)) as mesh:
        entries = [ModelRegistry.load(mesh.spec.registry).entry(ModelName(MODEL))]
        engine = SimulatedEngine(entries, settings, SystemClock())
        await engine.start()
        await engine.activate(ModelName(MODEL))
        async with bench_producer(mesh) as producer:
            await _through_mesh(producer, 20, random.Random(seed))  # warms every path
            added_ms: list[float] = []
            samples: list[Sample] = []
            direct_s: list[float] = []
            for number in range(rounds):
                chance_seed = seed + number
                direct = await _directly(engine, requests, random.Random(chance_seed))
                before = cpu_s(mesh)
                began = time.monotonic()
                through = await _through_mesh(producer, requests, random.Random(chance_seed))
                took_s = time.monotonic() - began
                used = _difference(cpu_s(mesh), before)
                added_ms.append(
                    1000 * float(np.median([s.ttft_s for s in through]) - np.median(direct))
                )
                samples += through
                direct_s += direct
            idle = await _idle_cpu(mesh, took_s)
            result.figures |= {
                "direct_ttft_ms": quantiles_ms(direct_s),
                "mesh_ttft_ms": quantiles_ms([s.ttft_s for s in samples]),
                "ratio_p50": round(
                    float(np.median([s.ttft_s for s in samples]) / np.median(direct_s)), 2
                ),
                "added_p50_ms_by_round": [round(value, 2) for value in added_ms],
                "cpu_ms_per_request": {
                    name: round(1000 * max(0.0, used[name] - idle[name]) / requests, 2)
                    for name in used
                },
            } | _hops(samples)
            result.figures["cpu_us_per_streamed_token"] = await _stream_cost(
                mesh, producer, tokens=64 if quick else 256
            )
        await engine.close()
    result.lines.append(
        Line(
            name="added first-token p50 of the best round, ms",
            value=round(min(added_ms), 2),
            bound=ADDED_P50_MS,
        )
    )
    return result


async def _open_loop(
    count: int, chance: random.Random, one: Callable[[int], Awaitable[None]]
) -> None:
    """Start *count* calls at Poisson times, whatever became of the earlier ones."""
    started, at_s = time.monotonic(), 0.0
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            at_s += chance.expovariate(RATE_RPS)
            await asyncio.sleep(max(0.0, started + at_s - time.monotonic()))
            tasks.create_task(_awaited(one(number)))


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable


async def _directly(engine: SimulatedEngine, count: int, chance: random.Random) -> list[float]:
    times: list[float] = []

    async def one(number: int) -> None:
        sent_at = time.monotonic()
        request = EngineRequest(
            request_id=RequestId(f"direct-{sent_at}-{number}"),
            model=ModelName(MODEL),
            prompt=_prompt(chance),
            sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True),
        )
        first = True
        async for _ in engine.generate(request):
            if first:
                times.append(time.monotonic() - sent_at)
                first = False

    await _open_loop(count, chance, one)
    return times


async def _through_mesh(producer: Producer, count: int, chance: random.Random) -> list[Sample]:
    samples: list[Sample] = []

    async def one(_number: int) -> None:
        sent_at = time.time()
        generation = await producer.submit(
            InferenceRequest(
                model=MODEL,
                prompt=_prompt(chance),
                prompt_tokens=len(PROMPT),
                max_tokens=MAX_TOKENS,
                temperature=0,
                ignore_eos=True,
                arrived_at=sent_at,
                slo=Slo(ttft_s=5.0),
            ),
            reply=ReplyMode.STREAM,
        )
        seen_at = 0.0
        async for _ in generation:
            seen_at = seen_at or time.time()
        final = await generation.final()
        assert isinstance(final, RequestCompleted), final
        samples.append(Sample(seen_at - sent_at, sent_at, seen_at, final.timings))

    await _open_loop(count, chance, one)
    return samples


def _prompt(chance: random.Random) -> tuple[int, ...]:
    """Another prompt each time, so that no prefix cache helps either arm."""
    return (*(chance.randrange(20, 500) for _ in range(16)), *PROMPT[16:])


def _hops(samples: list[Sample]) -> dict[str, object]:
    """Median and tail of each hop: global queue, lane, window, engine, reply."""
    names = ("global queue", "lane", "window", "engine")
    hops: dict[str, object] = {}
    for name, begin, end in zip(names, HOPS[:-1], HOPS[1:], strict=True):
        hops[f"hop {name}, ms"] = quantiles_ms(
            [getattr(s.timings, end) - getattr(s.timings, begin) for s in samples]
        )
    hops["hop reply, ms"] = quantiles_ms([s.seen_at - s.timings.first_token_at for s in samples])
    return hops


async def _idle_cpu(mesh: ProcessMesh, duration_s: float) -> dict[str, float]:
    """What the processes use for *duration_s* without work."""
    before = cpu_s(mesh)
    wait_s = min(5.0, duration_s)
    await asyncio.sleep(wait_s)
    return {
        name: used * duration_s / wait_s for name, used in _difference(cpu_s(mesh), before).items()
    }


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


async def _stream_cost(mesh: ProcessMesh, producer: Producer, *, tokens: int) -> dict[str, float]:
    """CPU of each process per token, with 256 streams of *tokens* at once."""
    before = cpu_s(mesh)
    own_before = time.process_time()

    async def one() -> int:
        generation = await producer.submit(
            InferenceRequest(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=tokens,
                temperature=0,
                ignore_eos=True,
                slo=Slo(ttft_s=30.0),
            ),
            reply=ReplyMode.STREAM,
        )
        seen = 0
        async for part in generation:
            seen += len(part.token_ids)
        return seen

    total = sum(await asyncio.gather(*(one() for _ in range(STREAMS))))
    used = _difference(cpu_s(mesh), before) | {"producer": time.process_time() - own_before}
    return {name: round(1e6 * value / total, 2) for name, value in used.items()}
