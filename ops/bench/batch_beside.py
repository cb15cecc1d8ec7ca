"""Interactive requests beside a batch, compared with the same lines as best effort over AMQP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from ops.bench.batch_mesh import Rig, body_of, create, ended, lines_of, producer_of
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder, Seconds
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from shared.contracts.telemetry import InstanceStatus
from shared.producer.producer import Producer

ENGINE = SimulatedSettings(max_running=16, time_scale=4.0)
"""An engine whose iterations take 20 ms and more, so that engines are the bottleneck."""
RATE_RPS = 10.0
MAX_TOKENS = 32
IN_PROGRESS = 512
WARM_UP_S: Seconds = 3.0
MOST_P95_RATIO = 1.15
MOST_IDLE = 0.1
SLO = Slo(ttft_s=2.0, tbt_s=0.2)
_decode: Decoder[InstanceStatus] = Decoder(InstanceStatus)


@dataclass(slots=True)
class _Seen:
    """First tokens of the probes, and states of the engines, during one load."""

    first_s: list[Seconds] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)
    """For each status of an instance: did requests run?"""

    @property
    def p95_s(self) -> Seconds:
        return float(np.quantile(self.first_s, 0.95))

    @property
    def busy_share(self) -> float:
        return sum(self.busy) / max(1, len(self.busy))


async def beside(rig: Rig, result: Result, *, seed: int, num_lines: int, alone_s: Seconds) -> None:
    """
    Measure first tokens beside a batch and beside best effort.

    Args:
        rig: A mesh with engines like `ENGINE`.
        result: Gets the figures and lines.
        seed: Seed of the arrivals of probes, which are the same beside both.
        num_lines: Number of lines of the batch.
        alone_s: Duration of the probes without other load.

    Raises:
        ExceptionGroup: A probe or a line failed.
    """

    async def over_amqp() -> None:
        async with producer_of(rig) as producer:
            limit = asyncio.Semaphore(IN_PROGRESS)
            async with asyncio.TaskGroup() as group:
                for number in range(num_lines):
                    await limit.acquire()
                    task = group.create_task(_line(producer, number))
                    task.add_done_callback(lambda _: limit.release())

    async def as_batch() -> None:
        await ended(rig, await create(rig, lines_of(num_lines, MAX_TOKENS), "24h"))

    await _probed(rig, seed, lambda: asyncio.sleep(WARM_UP_S))
    alone = await _probed(rig, seed, lambda: asyncio.sleep(alone_s))
    amqp = await _probed(rig, seed, over_amqp)
    batch = await _probed(rig, seed, as_batch)
    arms = {"no batch": alone, "best effort over AMQP": amqp, "batch": batch}
    for name, seen in arms.items():
        result.figures |= {
            f"first token p95 beside {name}, ms": 1e3 * seen.p95_s,
            f"probes beside {name}": len(seen.first_s),
            f"engines busy beside {name}": seen.busy_share,
        }
    busy = min(amqp.busy_share, batch.busy_share)
    result.lines += [
        Line(
            name="first token p95 beside a batch / beside best effort over AMQP",
            value=batch.p95_s / amqp.p95_s,
            bound=MOST_P95_RATIO,
        ),
        Line(
            name="share of the time without a running request",
            # The check of the lines and the result files are a large part of a short batch.
            value=None if result.quick else 1 - busy,
            bound=MOST_IDLE,
        ),
    ]


async def _line(producer: Producer, number: int) -> None:
    request = InferenceRequest(**body_of(number, MAX_TOKENS), slo=Slo())
    await (await producer.submit(request, reply=ReplyMode.FINAL)).final()


async def _probed(rig: Rig, seed: int, work: Callable[[], Awaitable[None]]) -> _Seen:
    """Send probes while *work* is done, and wait for their answers."""
    seen, is_over = _Seen(), asyncio.Event()
    async with producer_of(rig) as producer, asyncio.TaskGroup() as group:
        group.create_task(_probe(producer, seed, seen, is_over))
        async with _observed(rig, seen):
            await work()
        is_over.set()
    return seen


async def _probe(producer: Producer, seed: int, seen: _Seen, is_over: asyncio.Event) -> None:
    """Send interactive requests at random times until *is_over* is set."""
    random = np.random.default_rng(seed)
    async with asyncio.TaskGroup() as group:
        while not is_over.is_set():
            group.create_task(_first_token(producer, seen))
            await asyncio.sleep(random.exponential(1 / RATE_RPS))


async def _first_token(producer: Producer, seen: _Seen) -> None:
    begun = time.monotonic()
    request = InferenceRequest(**body_of(0, MAX_TOKENS), slo=SLO)
    generation = await producer.submit(request, reply=ReplyMode.STREAM)
    async for _ in generation:
        seen.first_s.append(time.monotonic() - begun)
        break
    await generation.final()


@contextlib.asynccontextmanager
async def _observed(rig: Rig, seen: _Seen) -> AsyncIterator[None]:
    """Context in which statuses of instances are counted."""

    def on_status(status: InstanceStatus) -> None:
        seen.busy.append(status.running > 0)

    async with rig.mesh.open_broker("headway-bench") as broker:
        queue = topology.temporary_queue("bench")
        bindings = [(topology.TELEMETRY, "status.#")]
        async with listening(broker, queue, _decode, bindings, on_status):
            yield
