"""
Batches beside interactive load, with kills, and alone.

- Every line of a batch is in one of its files, once, while gateways are killed, and the broker and
  the database restart; the memory of the gateway hardly grows.
- A batch alone is nearly as fast as direct publishing over AMQP.
- Interactive requests wait hardly longer beside a batch than beside the same lines as best effort.
"""

import asyncio
import time

from ops.bench.batch_beside import ENGINE, beside
from ops.bench.batch_kills import batch_with_kills
from ops.bench.batch_mesh import Rig, batch_mesh, body_of, create, ended, lines_of, producer_of
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode

LEAST_SHARE = 0.8
"""Least throughput of a batch, as a part of that of direct publishing."""
DIRECT_IN_PROGRESS = 512


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on private RabbitMQ nodes and a private PostgreSQL, which it restarts."""
    del broker  # another broker could not be restarted
    result = Result(name="batches", seed=seed, quick=quick)
    async with batch_mesh(SimulatedSettings(time_scale=0.2)) as rig:
        await _throughput(rig, result, num_lines=1000 if quick else 4000)
    await batch_with_kills(result, seed=seed, num_lines=600 if quick else 10_000)
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
