"""
Eight instances with three models over the real broker, and one `kill -9`, against simulation.

The same requests at the same times are served by real processes and queues, and by
`ops.sim.mesh`. No request may be lost, and as many must be in time as in the simulation.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.bench.idle_times import idle_times_of, longest_swaps
from ops.bench.meshes import bench_mesh, bench_producer, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.sim.arrivals import poisson
from ops.sim.mesh.arms import ARMS
from ops.sim.mesh.cluster import Loss, MeshOptions, ModelArrival, simulate_mesh
from ops.sim.mesh.kinds import GIB, DeviceKind, Fleet, ModelKind
from ops.sim.mesh.kinds import Served as EngineServes
from ops.sim.request import Arrival
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.planner.settings import LeaderSettings
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import MeshError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer
from solver.planning.problem.grouping import GROUP_BATCH_MULTIPLE
from solver.scheduling.engine.latency import LatencyTable

MODELS = tuple(ModelName(name) for name in ("tiny-llama", "tiny-llama-b", "tiny-qwen"))
MODEL_SHARES = (0.6, 0.3, 0.1)
INSTANCES = 8
KILLED = 0
ENGINE = SimulatedSettings(
    latency=LatencyCoefficients(constant_s=0.05, linear_s=5e-4, context_s=2e-6),
    max_running=16,
    kv_capacity_tokens=16_384,
    warm_activation_s=0.5,
    cold_activation_s=2.0,
)
MODEL_KIND = ModelKind(
    name="tiny",
    slowdown=1.0,
    weight_bytes=GIB,
    kv_bytes_per_token=ENGINE.kv_bytes_per_token,
    cold_s=ENGINE.cold_activation_s,
    warm_s=ENGINE.warm_activation_s,
)
DEVICE = DeviceKind(name="simulated", slowdown=1.0, memory_bytes=2 * GIB)
PACE = EngineServes(
    latency=LatencyTable.from_coefficients(ENGINE.latency, max_tokens=ENGINE.token_budget),
    kv_capacity_tokens=ENGINE.kv_capacity_tokens,
)
WINDOW = 4
"""
Window size of simulated instances; smaller than an agent's, because agents reorder their window.
"""
RATE_RPS = 26.0
DURATION_S, QUICK_S = 90.0, 12.0
SETTLE_S = 3.0
"""Time within which a new leader makes its first plan."""
ANSWER_TIMEOUT_S = 300.0
"""
Time without an answer after which a request counts as lost; it exceeds the waits of late requests,
which are served last.
"""
MOST_POINTS = 3.0
MOST_IDLE_SWAPS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Class:
    name: str
    slo: Slo
    share: float
    importance: Importance


CLASSES = (
    _Class(name="chat", slo=Slo(ttft_s=4.0), share=0.3, importance=Importance.HIGH),
    _Class(name="soon", slo=Slo(ttlt_s=30.0), share=0.4, importance=Importance.HIGH),
    _Class(name="later", slo=Slo(ttlt_s=90.0), share=0.3, importance=Importance.LOW),
)


def workload(seed: int, *, rate_rps: float, duration_s: Seconds) -> list[ModelArrival]:
    """Requests with Poisson arrivals; prompts have about 200 and answers about 60 tokens."""
    random = np.random.default_rng(seed)
    found = []
    for at in poisson(random, rate_rps=rate_rps, duration_s=duration_s):
        of = CLASSES[random.choice(len(CLASSES), p=[each.share for each in CLASSES])]
        found.append(
            ModelArrival(
                model=MODELS[random.choice(len(MODELS), p=MODEL_SHARES)],
                arrival=Arrival(
                    arrived_at=at,
                    prompt_tokens=int(random.integers(50, 350)),
                    output_tokens=int(random.integers(20, 100)),
                    class_name=of.name,
                    slo=of.slo,
                    importance=of.importance,
                ),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of one request."""

    class_name: str
    attained: bool
    lost: str = ""
    """Reason for which the request has no answer; empty if it has one."""


async def serve(
    mesh: ProcessMesh, producer: Producer, work: Sequence[ModelArrival], *, kill_at_s: Seconds
) -> list[Served]:
    """Send *work* at its times, kill an agent meanwhile, and wait for all answers."""
    began = time.monotonic()

    async def one(number: int, each: ModelArrival) -> Served:
        await asyncio.sleep(max(0.0, began + each.arrival.arrived_at - time.monotonic()))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                generation = await producer.submit(body_of(number, each), reply=ReplyMode.FINAL)
                final = await generation.final()
        except (TimeoutError, MeshError) as error:
            reason = f"request {number} at {each.arrival.arrived_at:.1f} s: {error!r}"
            return Served(each.arrival.class_name, attained=False, lost=reason)
        if not isinstance(final, RequestCompleted):
            reason = f"request {number}: {final.error.code}: {final.error.message}"
            return Served(each.arrival.class_name, attained=False, lost=reason)
        return Served(each.arrival.class_name, attained=final.verdict.attained)

    async def kill() -> None:
        await asyncio.sleep(kill_at_s)
        mesh.processes[f"agent-i{KILLED}"].signal(signal.SIGKILL)
        say(f"killed an instance after {kill_at_s:.0f} s")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kill())
        return await asyncio.gather(*(one(number, each) for number, each in enumerate(work)))


def body_of(number: int, each: ModelArrival) -> InferenceRequest:
    arrival = each.arrival
    # Prompts have different first tokens, so that no request reuses another request's KV.
    prompt = (10 + number % 490, 10 + number // 490, *(20,) * (arrival.prompt_tokens - 2))
    return InferenceRequest(
        model=each.model,
        prompt=prompt,
        max_tokens=arrival.output_tokens,
        temperature=0.0,
        ignore_eos=True,
        slo=arrival.slo,
        importance=arrival.importance,
    )


def predicted(work: Sequence[ModelArrival], *, seed: int, kill_at_s: Seconds) -> Sequence[Served]:
    """
    Serve *work* in the simulated mesh, with an instance that dies at the same time as the real
    agent.
    """
    options = MeshOptions(
        fleet=TinyFleet(
            devices=(DEVICE,) * INSTANCES,
            models=dict.fromkeys(MODELS, MODEL_KIND),
        ),
        conduct=replace(ARMS["qlm"].conduct, window=WINDOW),
        planner=ARMS["qlm"].planner(seed, GROUP_BATCH_MULTIPLE),
        plan_period_s=LeaderSettings().plan_period_s,
        max_running=ENGINE.max_running,
        losses=(Loss(number=KILLED, at=kill_at_s),),
    )
    outcome = simulate_mesh(work, options)
    return [
        Served(request.arrival.class_name, attained=not request.violated)
        for request in outcome.requests
    ]


class TinyFleet(Fleet):
    """Engines with the latency of the agents' settings, which is equal for all models."""

    def served(self, device: DeviceKind, model: ModelName) -> EngineServes | None:
        del device, model
        return PACE


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Serve and simulate the same requests; a quick run sends requests for some seconds only."""
    result = Result(name="fleet", seed=seed, quick=quick)
    duration_s = QUICK_S if quick else DURATION_S
    work = workload(seed, rate_rps=RATE_RPS, duration_s=duration_s)
    simulated = predicted(work, seed=seed, kill_at_s=duration_s / 2)
    agents = tuple(
        simulated_agent(f"i{number}", ENGINE, MODELS[number % len(MODELS)])
        for number in range(INSTANCES)
    )
    async with bench_mesh(broker, agents) as mesh, bench_producer(mesh) as producer:
        await asyncio.sleep(SETTLE_S)
        say(f"{len(work)} requests in {duration_s:.0f} s to {INSTANCES} instances")
        async with idle_times_of(mesh.spec.leader_metrics) as idle:
            served = await serve(mesh, producer, work, kill_at_s=duration_s / 2)
    shares = {"served": _attained(served), "simulated": _attained(simulated)}
    for name, by_class in shares.items():
        result.figures[f"in time, {name}, %"] = by_class
    result.figures["requests"] = len(work)
    for each in served:
        if each.lost:
            say(f"without an answer: {each.lost}")
    result.lines += [
        Line(name="lost requests", value=sum(bool(each.lost) for each in served), bound=0),
        Line(
            name="attainment, served and simulated, points apart",
            value=abs(shares["served"]["all"] - shares["simulated"]["all"]),
            bound=MOST_POINTS,
        ),
        Line(
            name="longest idle time beside work, in swap times",
            value=longest_swaps(idle),
            bound=MOST_IDLE_SWAPS,
        ),
    ]
    return result


def _attained(found: Sequence[Served]) -> dict[str, float]:
    """Percentage of requests in time, by class and in total."""
    total = Counter(each.class_name for each in found)
    good = Counter(each.class_name for each in found if each.attained)
    shares = {name: 100 * good[name] / total[name] for name in sorted(total)}
    return shares | {"all": 100 * good.total() / total.total()}
