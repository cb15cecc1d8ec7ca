"""
Batches beside interactive load, with kills, and alone.

- Every line of a batch is in one of its files, once, while gateways are killed and the broker
  restarts; the memory of the gateway hardly grows.
- A batch alone is nearly as fast as direct publishing over AMQP.
- Interactive requests wait hardly longer beside a batch than beside the same lines as best effort.
"""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ops.bench.batch_beside import ENGINE, beside
from ops.bench.batch_mesh import (
    GIVE_UP_S,
    Load,
    Rig,
    ask,
    batch_mesh,
    body_of,
    create,
    custom_ids,
    ended,
    lines_of,
    loaded,
    polled,
    producer_of,
)
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from shared.producer.producer import Producer

NUM_KILLS = 3
MOST_GROWTH_MIB = 150.0
LEAST_SHARE = 0.8
"""Least throughput of a batch, as a part of that of direct publishing."""
DIRECT_IN_PROGRESS = 512


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on private RabbitMQ nodes, one of which it restarts."""
    del broker  # another broker could not be restarted
    result = Result(name="batches", seed=seed, quick=quick)
    random = np.random.default_rng(seed)
    async with batch_mesh(SimulatedSettings(time_scale=0.2)) as rig:
        await _throughput(rig, result, num_lines=400 if quick else 4000)
        await _kills(rig, result, random, num_lines=600 if quick else 10_000)
    async with batch_mesh(ENGINE) as rig:
        num_lines, alone_s = (200, 3.0) if quick else (10_000, 100.0)
        await beside(rig, result, seed=seed, num_lines=num_lines, alone_s=alone_s)
    return result


async def _throughput(rig: Rig, result: Result, *, num_lines: int) -> None:
    """Compare a batch with direct publishing of the same requests, both without other load."""
    max_tokens = 8
    async with producer_of(rig) as producer:
        limit = asyncio.Semaphore(DIRECT_IN_PROGRESS)

        async def one(number: int) -> None:
            async with limit:
                body = body_of(number, max_tokens)
                request = InferenceRequest(**body, slo=Slo(ttlt_s=3600.0))
                await (await producer.submit(request, reply=ReplyMode.FINAL)).final()

        begun = time.monotonic()
        await asyncio.gather(*map(one, range(num_lines)))
        direct = num_lines / (time.monotonic() - begun)
    begun = time.monotonic()
    await ended(rig, await create(rig, lines_of(num_lines, max_tokens), "24h"))
    batch = num_lines / (time.monotonic() - begun)
    result.figures |= {"direct, lines per s": direct, "batch, lines per s": batch}
    result.lines.append(
        Line(
            name="direct publishing, as a multiple of a batch",
            value=direct / batch,
            bound=1 / LEAST_SHARE,
        )
    )


async def _kills(rig: Rig, result: Result, random: np.random.Generator, *, num_lines: int) -> None:
    """Kill the gateway, restart the broker, and look for each line in the results."""
    content = lines_of(num_lines, 16)
    steps = [num_lines * (number + 1) // (NUM_KILLS + 2) for number in range(NUM_KILLS + 1)]
    growth = 0.0
    async with loaded(rig, _interactive(random, rate_rps=5.0)):
        batch_id = await create(rig, content, "24h")
        base = _memory_mib(rig)
        batch: dict[str, Any] = {}
        async with asyncio.timeout(GIVE_UP_S):
            async for batch in polled(rig, batch_id):
                growth = max(growth, _memory_mib(rig) - base)
                if not steps or batch["request_counts"]["completed"] < steps[0]:
                    continue
                steps.pop(0)
                if steps:
                    await _kill_gateway(rig)
                    base = _memory_mib(rig)
                else:
                    await asyncio.to_thread(rig.node.stop)
                    await asyncio.to_thread(rig.node.start)
    output = await custom_ids(rig, batch["output_file_id"])
    errors = await custom_ids(rig, batch["error_file_id"])
    times = Counter(output + errors)
    wrong = sum(times[f"c{number}"] != 1 for number in range(num_lines))
    result.figures |= {
        "lines, with three kills and a restart": num_lines,
        "status": batch["status"],
        "lines of the error file": len(errors),
        "growth of the gateway, MiB": growth,
    }
    result.lines += [
        Line(name="lines that are not in the results once", value=float(wrong), bound=0.0),
        Line(name="lines that failed", value=float(len(errors)), bound=0.0),
        Line(name="growth of the gateway, MiB", value=growth, bound=MOST_GROWTH_MIB),
    ]


def _interactive(random: np.random.Generator, *, rate_rps: float) -> Load:
    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            await ask(producer, slo=Slo(ttft_s=2.0, tbt_s=0.2))
            await asyncio.sleep(random.exponential(1 / rate_rps))
            yield

    return load


async def _kill_gateway(rig: Rig) -> None:
    gateway = rig.mesh.processes["gateway"]
    gateway.signal(signal.SIGKILL)
    await gateway.wait(10.0)
    await gateway.start()
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await rig.http.get("/ready")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.1)


def _memory_mib(rig: Rig) -> float:
    """Resident memory of the gateway; 0 while it is not running."""
    try:
        status = Path(f"/proc/{rig.mesh.processes['gateway'].pid}/status").read_text()
    except OSError:
        return 0.0
    lines = (line.split() for line in status.splitlines())
    return next((int(each[1]) / 1024 for each in lines if each[0] == "VmRSS:"), 0.0)
