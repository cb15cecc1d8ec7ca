"""One round of `ops.bench doors`: new servers, one door and one load."""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from ops.bench.cores import computed_s
from ops.bench.doors_cells import KILLED, REAL, SATURATED, Cell
from ops.bench.doors_client import Answer, Client
from ops.bench.doors_fronts import OURS, Door
from ops.bench.doors_load import ServerCounts
from ops.bench.doors_processes import (
    Brokers,
    OpenDoor,
    RunningServer,
    opened,
    simulated_servers,
)
from ops.bench.doors_server import Counts
from ops.bench.doors_traffic import Branch, RequestClass, Session, Step, sessions
from ops.bench.progress import say
from ops.sim.attached.outcomes import is_missed
from shared.contracts.base import Seconds
from shared.contracts.qos import Slo

PATIENCE_S: Seconds = 240.0
"""Time after the last arrival at which answers count as lost, at full speed."""
WARM_UP_S: Seconds = 20.0
"""Time after which a load begins although a server has had no request, at full speed."""
_WARM_UP_REQUESTS = 3
"""Number of requests for each server that are sent at once."""
KILL_AT, DOWN_S = 1 / 3, 5.0
"""Part of a load after which a server is killed, and the time until it is started again."""
BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a round measures."""

    cell: Cell
    load: str
    rate_rps: float
    """Sessions per second at full speed."""
    seconds: Seconds
    """Duration of the arrivals at full speed."""
    seed: int
    scale: float

    def sessions(self) -> list[Session]:
        """The load, equal for every door."""
        seconds = self.seconds / 2 if self.load == SATURATED else self.seconds
        return sessions(
            self.cell.make,
            rate_rps=self.rate_rps,
            seconds=seconds,
            seed=self.seed,
            scale=self.scale,
        )


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one class."""

    requests: int
    in_time: float
    """Share of requests with all tokens in time, 0..1."""
    first_p50_s: Seconds | None
    first_p99_s: Seconds | None
    whole_p50_s: Seconds | None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one door has done under one load; None for what was not measured."""

    classes: dict[str, ClassFigures]
    missed: float
    """Share of requests with a first-token target that were not in time, 0..1."""
    first_p50_s: Seconds | None
    """Median time to the first token of these."""
    lost: int
    errors: dict[str, int]
    """Why answers are lost -> number of these."""
    all_done_s: Seconds
    """Time from the begin of the load until the last answer was complete."""
    last_batch_s: Seconds | None
    """The same of the last batch answer."""
    cached: float
    """Share of prompt tokens that were in a server's cache, 0..1."""
    answer_tokens_per_s: float
    """Answer tokens that clients got, until all was done."""
    twice_prompt: float
    """Prompt tokens that servers began beyond those of whole answers, as a share of these."""
    twice_answer: float
    """Answer tokens that servers generated beyond those that clients got, as a share of these."""
    spread: float | None
    """Mean of the largest minus the smallest number of running requests over the servers."""
    door_cpu_ms: float | None
    """CPU time of the door's processes per request."""
    broker_cpu_ms: float | None
    with_priority: int
    """Number of requests that reached a server with a priority other than 0."""


async def measured(
    asked: Asked, door: Door, brokers: Brokers, running: Sequence[RunningServer] | None = None
) -> Round:
    """
    Serve one load through one door.

    Args:
        asked: The load.
        door: The door.
        brokers: Virtual hosts for a door that needs one.
        running: Servers that run already; None: new simulated ones.

    Raises:
        EngineError: A process does not start.
    """
    limit = aiohttp.ClientTimeout(total=None)
    async with (
        _directory() as directory,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as http,
        _servers(asked, directory, running) as servers,
        _broker(door, brokers) as broker,
        opened(
            door, [(server.model, server.url) for server in servers], directory, broker
        ) as front,
    ):
        client = Client(
            http=http,
            door=door,
            choice=front.choice,
            is_simulated=asked.cell.kind != REAL,
            word_share=asked.cell.word_share,
        )
        counts = ServerCounts(http, servers)
        await _warm_up(client, counts)
        return await _served(asked, client, counts, front)


async def _served(asked: Asked, client: Client, counts: ServerCounts, front: OpenDoor) -> Round:
    load = asked.sessions()
    client.answers.clear()
    counts.spreads.clear()
    before, cpu_s, broker_s = counts.total(), _cpu_s(front.pids), _broker_s(front)
    begun_at = time.time()
    following = asyncio.create_task(counts.follow())
    killing = asyncio.create_task(_kill(asked, counts.servers[0]))
    try:
        await client.serve(load, asked.scale * PATIENCE_S)
    finally:
        following.cancel()
        killing.cancel()
        await asyncio.gather(following, killing, return_exceptions=True)
    number = max(1, len(client.answers))
    door_ms = 1e3 * (_cpu_s(front.pids) - cpu_s) / number if front.pids else None
    broker_ms = None
    if broker_s is not None:
        broker_ms = 1e3 * ((_broker_s(front) or 0.0) - broker_s) / number
    await counts.look()
    return round_of(
        client.answers,
        begun_at=begun_at,
        before=before,
        after=counts.total(),
        spread=counts.mean_spread,
        door_cpu_ms=door_ms,
        broker_cpu_ms=broker_ms,
    )


def round_of(
    answers: Sequence[Answer],
    *,
    begun_at: float,
    before: Counts,
    after: Counts,
    spread: float | None = None,
    door_cpu_ms: float | None = None,
    broker_cpu_ms: float | None = None,
) -> Round:
    """
    Figures of a round.

    Args:
        answers: All requests of the load.
        begun_at: Begin of the load.
        before: Counts of all servers together at the begin.
        after: The same at the end.
        spread: See `Round`.
        door_cpu_ms: See `Round`.
        broker_cpu_ms: See `Round`.
    """
    by_class: dict[str, list[Answer]] = {}
    for answer in answers:
        by_class.setdefault(answer.request_class.name, []).append(answer)
    targeted = [each for each in answers if each.request_class.slo.ttft_s is not None]
    whole = [each for each in answers if each.outcome.finished]
    received = sum(each.outcome.num_tokens for each in answers)
    prompts = sum(each.prompt_tokens for each in whole)
    begun = after.prompt_tokens - before.prompt_tokens
    all_done_s = _last_s(whole, begun_at) or 0.0
    return Round(
        classes={name: _class_figures(every) for name, every in sorted(by_class.items())},
        missed=_share(targeted, missed=True),
        first_p50_s=_quantile(_first_s(targeted), 0.5),
        lost=len(answers) - len(whole),
        errors=Counter(each.error for each in answers if not each.outcome.finished),
        all_done_s=all_done_s,
        last_batch_s=_last_s([e for e in whole if e.request_class.name == BATCH], begun_at),
        cached=(after.cached_tokens - before.cached_tokens) / max(1, begun),
        answer_tokens_per_s=received / max(1e-9, all_done_s),
        twice_prompt=(begun - prompts) / max(1, prompts),
        twice_answer=(after.answer_tokens - before.answer_tokens - received) / max(1, received),
        spread=spread,
        door_cpu_ms=door_cpu_ms,
        broker_cpu_ms=broker_cpu_ms,
        with_priority=after.with_priority - before.with_priority,
    )


def _class_figures(answers: Sequence[Answer]) -> ClassFigures:
    whole = [_last_s([each], each.outcome.arrived_at) for each in answers if each.outcome.finished]
    return ClassFigures(
        requests=len(answers),
        in_time=_share(answers, missed=False),
        first_p50_s=_quantile(_first_s(answers), 0.5),
        first_p99_s=_quantile(_first_s(answers), 0.99),
        whole_p50_s=_quantile([each for each in whole if each is not None], 0.5),
    )


def _share(answers: Sequence[Answer], *, missed: bool) -> float:
    found = [is_missed(each.outcome, each.request_class.slo) is missed for each in answers]
    return sum(found) / max(1, len(found))


def _first_s(answers: Sequence[Answer]) -> list[Seconds]:
    outcomes = [each.outcome for each in answers]
    return [
        each.first_token_at - each.arrived_at
        for each in outcomes
        if each.first_token_at is not None
    ]


def _last_s(answers: Sequence[Answer], begun_at: float) -> Seconds | None:
    ends = [each.outcome.last_token_at for each in answers]
    return max((end - begun_at for end in ends if end is not None), default=None)


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


async def _kill(asked: Asked, server: RunningServer) -> None:
    """Kill a server within the load `KILLED`, and start it again."""
    if asked.load != KILLED or server.process is None:
        return
    await asyncio.sleep(asked.scale * asked.seconds * KILL_AT)
    await server.process.kill()
    await asyncio.sleep(asked.scale * DOWN_S)
    await server.process.start()


async def _warm_up(client: Client, counts: ServerCounts) -> None:
    """Send some requests until every server has had one, so that all are known to the door."""
    request_class = RequestClass("warm-up", Slo(ttft_s=10.0), 0)
    give_up_at = time.monotonic() + WARM_UP_S
    number = 0
    while not counts.all_used:
        if time.monotonic() > give_up_at:
            say(f"{client.door.name}: a server has got no request before the load")
            return
        asks = []
        for server in _WARM_UP_REQUESTS * list(counts.servers):
            number += 1
            branch = Branch(" ".join(f"warm{number}x{word}" for word in range(40)), 8)
            session = Session(
                at_s=0.0,
                request_class=request_class,
                steps=(Step((branch,)),),
                model=server.model,
                key=f"warm-{number}",
            )
            asks.append(client.ask(session, "", branch))
        await asyncio.gather(*asks)
        await asyncio.sleep(0.5)
        await counts.look()


def _cpu_s(pids: Sequence[int]) -> Seconds:
    return sum(computed_s(pid) for pid in pids)


def _broker_s(front: OpenDoor) -> Seconds | None:
    return None if front.broker_pid is None else computed_s(front.broker_pid)


@asynccontextmanager
async def _directory() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headway-doors-") as directory:
        yield Path(directory)


@asynccontextmanager
async def _servers(
    asked: Asked, directory: Path, running: Sequence[RunningServer] | None
) -> AsyncIterator[Sequence[RunningServer]]:
    if running is not None:
        yield running
        return
    async with simulated_servers(asked.cell, asked.scale, directory) as servers:
        yield servers


@asynccontextmanager
async def _broker(door: Door, brokers: Brokers) -> AsyncIterator[str | None]:
    if door.name != OURS:
        yield None
        return
    async with brokers.virtual_host() as url:
        yield url
