"""
Benchmark of the effect of queued best-effort work on interactive requests.

Measures the time from publish to pull of interactive requests, with empty queues and with
best-effort requests queued.
"""

import asyncio
import random
import time

import numpy as np

from ops.bench.meshes import MODEL, bench_mesh, bench_producer, simulated_agent
from ops.bench.result import Line, Result, quantiles_ms
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.base import encode
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer

RATE_RPS = 10.0
DUMP = 100_000
QUICK_DUMP = 5_000
OUTSTANDING_CONFIRMS = 64
RATIO_P99 = 3.0


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run queues 5,000 best-effort requests."""
    dump, probes = (QUICK_DUMP, 80) if quick else (DUMP, 300)
    result = Result(name="backlog", seed=seed, quick=quick)
    async with (
        bench_mesh(broker, (simulated_agent("bench", SimulatedSettings()),)) as mesh,
        bench_producer(mesh) as producer,
    ):
        await _probe(producer, 20, random.Random(seed))
        empty_s = await _probe(producer, probes, random.Random(seed))
        began = time.monotonic()
        async with mesh.open_broker("headway-dump") as dumping:
            await _dump(dumping, dump)
            published_s = time.monotonic() - began
            moving_s = await _probe(producer, probes, random.Random(seed))
            await _until_grouped(mesh, dumping)
            grouped_s = time.monotonic() - began
            queued_s = await _probe(producer, probes, random.Random(seed))
            left = await _waiting(dumping)
    ratio = float(np.quantile(queued_s, 0.99) / np.quantile(empty_s, 0.99))
    result.figures |= {
        "dump": dump,
        "still queued at the end": left,
        "published in s": round(published_s, 1),
        "in lanes after s": round(grouped_s, 1),
        "publish to pull, empty, ms": quantiles_ms(empty_s),
        "publish to pull, dump being grouped, ms": quantiles_ms(moving_s),
        "publish to pull, dump in lanes, ms": quantiles_ms(queued_s),
        "ratio of p99, dump being grouped": round(
            float(np.quantile(moving_s, 0.99) / np.quantile(empty_s, 0.99)), 2
        ),
    }
    result.lines.append(
        Line(
            name=f"p99 publish to pull with {dump} queued over empty",
            value=round(ratio, 2) if left > dump // 2 else None,
            bound=RATIO_P99,
        )
    )
    return result


async def _probe(producer: Producer, count: int, chance: random.Random) -> list[float]:
    """
    Publish interactive requests at Poisson times; return seconds from publish to pull of each.
    """
    waits_s: list[float] = []

    async def one() -> None:
        sent_at = time.time()
        generation = await producer.submit(
            InferenceRequest(
                model=MODEL,
                prompt=tuple(range(20, 60)),
                max_tokens=8,
                temperature=0,
                ignore_eos=True,
                slo=Slo(ttft_s=10.0),
            ),
            reply=ReplyMode.FINAL,
        )
        final = await generation.final()
        assert isinstance(final, RequestCompleted), final
        waits_s.append(final.timings.pulled_at - sent_at)

    started, at_s = time.monotonic(), 0.0
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            at_s += chance.expovariate(RATE_RPS)
            await asyncio.sleep(max(0.0, started + at_s - time.monotonic()))
            tasks.create_task(one())
    return waits_s


async def _dump(broker: Broker, count: int) -> None:
    """Publish *count* best-effort requests without waiting for their answers."""
    body = encode(
        InferenceRequest(
            model=MODEL,
            prompt=tuple(range(20, 84)),
            max_tokens=200,
            temperature=0,
            ignore_eos=True,
        )
    )
    left = iter(range(count))

    async def worker() -> None:
        for number in left:
            message = OutMessage(body=body, message_id=f"dump-{number}")
            await broker.publish(topology.REQUESTS, topology.REST_KEY, message)

    await asyncio.gather(*(worker() for _ in range(OUTSTANDING_CONFIRMS)))


async def _until_grouped(mesh: ProcessMesh, broker: Broker) -> None:
    """Wait until the global queue is empty."""
    while True:
        depth = await broker.depth(topology.GLOBAL_REST)
        if depth is not None and depth.ready == 0:
            return
        mesh.check()
        await asyncio.sleep(0.5)


async def _waiting(broker: Broker) -> int:
    from services.mesh.queues import count_queues  # noqa: PLC0415 - a slow import
    from shared.contracts.base import ModelName  # noqa: PLC0415 - as above
    from shared.contracts.lanes import LaneLayout  # noqa: PLC0415 - as above

    counts = await count_queues(broker, (ModelName(MODEL),), LaneLayout())
    return sum(entry.ready for entry in counts if entry.queue.startswith(("lane", "overflow")))
