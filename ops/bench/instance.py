"""
Time that the control of an instance takes for one event.

An agent with the simulated engine serves requests over the in-process broker and records its
events. Then the events are replayed through the instance, and timed while it has 256 running and 64
pulled requests.
Pulled requests and events that cause a pull or a run are listed apart, since they decide which
request is served next. Times are also given in units of a fixed loop of the same run, which makes
machines comparable.
"""

import asyncio
import gc
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np

from ops.bench.result import Line, Result
from services.agent.backends.settings import EngineSettings, SimulatedSettings
from services.agent.recording import Begin, Record, records
from services.agent.service import serve
from services.agent.settings import PullSettings, Settings
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker, OutMessage
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import ModelName, RequestId, TenantId, encode
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ModelRef, QueuedRequest, Sampling
from shared.models.tiny import make_tiny_models
from shared.runtime.cli import Ports
from shared.runtime.clock import SystemClock
from shared.runtime.health import Health
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.instance import Instance
from solver.planning.lanes import lane_for

RUNNING, WAITING = 256, 64
MOST_P50_US, MOST_P99_US, MOST_EVENTS = 15.0, 150.0, 12.0
MODEL = ModelName("tiny-llama")
LEAST_NUMBER = 30
"""Number of events of a kind from which its percentiles count."""
_LOOP = range(1000)
Times = dict[tuple[str, bool], list[float]]
"""(Kind of event, whether it has caused a pull or a run) -> times in microseconds."""


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - the broker of this process is enough
) -> Result:
    """Run the benchmark."""
    result = Result(name="instance", seed=seed, quick=quick)
    number = 1_500 if quick else 6_000
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events"
        await _record(path, seed=seed, number=number)
        recorded = list(records(path))
    loop_us = float(np.median([_loop_us() for _ in range(200)]))
    result.figures["loop, us"] = round(loop_us, 2)
    timed, held = replayed(recorded, repeats=1 if quick else 3)
    result.figures["held"] = held
    for (kind, decides), times_us in sorted(timed.items()):
        p50, p99 = (float(value) for value in np.percentile(times_us, [50, 99]))
        result.figures[f"{kind}{', pulls or admits' if decides else ''}"] = {
            "number": len(times_us),
            "p50 us": round(p50, 1),
            "p99 us": round(p99, 1),
            "p50 loops": round(p50 / loop_us, 2),
            "p99 loops": round(p99 / loop_us, 2),
        }
    kinds = [
        np.percentile(times, [50, 99])
        for (_, decides), times in timed.items()
        if not decides and len(times) >= LEAST_NUMBER
    ]
    p50, p99 = (float(value) for value in np.max(kinds, axis=0))
    events, commands = per_request(recorded)
    result.lines = [
        Line(
            name="slowest p50 of a kind that neither pulls nor admits, us",
            value=p50,
            bound=MOST_P50_US,
        ),
        Line(
            name="slowest p99 of a kind that neither pulls nor admits, us",
            value=p99,
            bound=MOST_P99_US,
        ),
        Line(name="events per request", value=events, bound=MOST_EVENTS),
        Line(name="commands per request", value=commands, bound=MOST_EVENTS),
    ]
    return result


async def _record(path: Path, *, seed: int, number: int) -> None:
    """Serve *number* requests with an agent that records its events."""
    registry = make_tiny_models(path.parent / "models", weights=False)
    settings = Settings(
        instance_id="bench",
        registry=str(registry),
        models=(MODEL,),
        initial_model=MODEL,
        drain_timeout_s=1.0,
        record=str(path),
        pull=PullSettings(window=WAITING, max_backlog_s=1e6),
        engine=EngineSettings(
            backend="simulated",
            simulated=SimulatedSettings(
                max_running=RUNNING,
                token_budget=8192,
                kv_capacity_tokens=1 << 20,
                cold_activation_s=0.0,
                latency=LatencyCoefficients(constant_s=0.01, linear_s=1e-6),
            ),
        ),
    )
    health, stop, hub = Health(service="agent"), asyncio.Event(), MemoryHub()
    async with MemoryBroker(hub, client_name="bench") as broker:
        ports = Ports(
            settings=settings,
            open_broker=lambda name: MemoryBroker(hub, client_name=name),
            clock=SystemClock(),
            health=health,
        )
        agent = asyncio.create_task(serve(ports, stop))
        try:
            while not health.ready:
                await asyncio.wait([agent], timeout=0.05)
                if agent.done():
                    agent.result()
            queues, chance = WorkQueues(broker, "bench"), Random(seed)
            lanes = {await _publish(queues, chance, index) for index in range(number)}
            await queues.close()
            while any([await _is_filled(broker, lane) for lane in lanes]):
                await asyncio.sleep(0.2)
        finally:
            stop.set()
            await agent


async def _publish(queues: WorkQueues, chance: Random, index: int) -> str:
    now = time.time()
    max_tokens, prompt_tokens = chance.randint(16, 64), chance.randint(8, 64)
    slo = Slo(ttft_s=chance.choice((1e3, 1e4)))
    lane = lane_for(
        model=MODEL,
        importance=Importance.HIGH,
        time_left_s=slo.ttft_s or 0.0,
        work_tokens=max_tokens,
        layout=LaneLayout(),
    ).queue_name
    request = QueuedRequest(
        request_id=RequestId(f"r{index}"),
        model=ModelRef(name=MODEL, base=MODEL),
        prompt=tuple(chance.randrange(10, 500) for _ in range(prompt_tokens)),
        prompt_tokens=prompt_tokens,
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        slo=slo,
        arrived_at=now,
        grouped_at=now,
        tenant=TenantId("t"),
        lane=lane,
    )
    message = OutMessage(body=encode(request), kind="request.queued.v1", message_id=f"r{index}")
    await queues.publish(lane, message)
    return lane


async def _is_filled(broker: Broker, lane: str) -> bool:
    depth = await broker.depth(lane)
    return depth is not None and depth.ready > 0


def replayed(recorded: list[Record], *, repeats: int) -> tuple[Times, dict[str, float]]:
    """
    Times of the events that were handled under load, and the means of what was held then.

    Args:
        repeats: Number of replays, all of which are counted.
    """
    times: Times = defaultdict(list)
    running: list[int] = []
    waiting: list[int] = []
    gc.collect()
    gc.freeze()  # an agent holds no recording through which its garbage collector must go
    for _ in range(repeats):
        instance: Instance | None = None
        for now, event in recorded:
            if isinstance(event, Begin):
                instance = Instance(event.settings, event.models, now)
                continue
            assert instance is not None, "a recording begins with its settings"
            requests = instance.requests
            is_loaded = requests.num_runs >= 0.9 * RUNNING and len(requests.window) >= WAITING / 2
            held = requests.num_runs, len(requests.window)
            begun = time.perf_counter_ns()
            commands = instance.handle(event, now)
            time_us = (time.perf_counter_ns() - begun) / 1e3
            if not is_loaded:
                continue
            running.append(held[0])
            waiting.append(held[1])
            decides = isinstance(event, ev.Delivered) or any(
                isinstance(each, do.Get | do.Submit) for each in commands
            )
            times[type(event).__name__, decides].append(time_us)
    gc.unfreeze()
    means = {"running": float(np.mean(running)), "waiting": float(np.mean(waiting))}
    return times, {name: round(mean, 1) for name, mean in means.items()}


def per_request(recorded: list[Record]) -> tuple[float, float]:
    """Mean numbers of events and commands per finished request, over the whole recording."""
    instance: Instance | None = None
    events = commands = 0
    for now, event in recorded:
        if isinstance(event, Begin):
            instance = Instance(event.settings, event.models, now)
        elif instance is not None:
            events += 1
            commands += len(instance.handle(event, now))
    finished = 0 if instance is None else instance.totals.completed
    return events / finished, commands / finished


def _loop_us() -> float:
    begun = time.perf_counter_ns()
    sum(_LOOP)
    return (time.perf_counter_ns() - begun) / 1e3
