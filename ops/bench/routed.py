"""
Modes of routing over the real broker, with four instances of which one has a third of the speed.

Each mode serves the same requests at the same times, in a mesh and in the simulator with the
measured speeds. With default routing, as many interactive requests must be in time in the mesh as
in the simulation. A request is in time if its first token is in time.
"""

import asyncio
import time
from collections.abc import Sequence

from ops.bench.meshes import MODEL, bench_mesh, bench_producer, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.bench.routed_load import Prompts
from ops.bench.routed_paces import Paces, measured_paces
from ops.bench.routed_simulated import simulated
from ops.bench.routed_waits import LOST, ServedRequest, Waits
from ops.sim.limits import EngineLimits
from ops.sim.routing.workload import MIXES, RoutedArrival, RoutedTraffic
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.base import ModelName
from shared.contracts.errors import MeshError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer

INSTANCES, SLOW = 4, 3.0
"""Number of instances, and factor by which one of the instances is slower."""
SIZE = 0.125
"""
Scale of the lengths of QUARTZ's workloads; the engine's times per token are scaled by 1 / SIZE.
"""
LATENCY = LatencyCoefficients(constant_s=0.02, linear_s=1.2e-3, context_s=4e-6)
LIMITS = EngineLimits(max_running=64, max_budget_tokens=256, kv_capacity_tokens=12_544)
RATE_RPS = 7.5
WARM_S, DURATION_S, QUICK_S = 20.0, 100.0, 8.0
"""
Warm-up, in which the estimator learns the engines' speed; measured time; time of a quick run.

Requests of the warm-up do not count. A quick run has no warm-up: it only tests the set-up.
"""
MODES = ("default", "pull", "locality-aware", "fifo-p2c")
SETTLE_S = 2.0
"""Time within which a new leader makes its first plan and routers discover the instances."""
ANSWER_TIMEOUT_S = 120.0
MOST_POINTS = 3.0


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark with one mesh per mode; a quick run has two modes of some seconds each."""
    result = Result(name="routed", seed=seed, quick=quick)
    duration_s = QUICK_S if quick else DURATION_S
    warm_s = 0.0 if quick else WARM_S
    traffic = RoutedTraffic(
        mix=MIXES["mixed"],
        rate_rps=RATE_RPS,
        num_requests=round(RATE_RPS * (warm_s + duration_s)),
        seed=seed,
        size=SIZE,
    )
    work = traffic.arrivals()
    counts = [each.arrival.arrived_at >= warm_s for each in work]
    apart, lost = 0.0, 0
    for mode in MODES[:2] if quick else MODES:
        say(f"{mode}: {len(work)} requests in {duration_s:.0f} s to {INSTANCES} instances")
        served, paces = await _through_mesh(mode, work, broker)
        predicted_wait = simulated(mode, work, LATENCY, LIMITS, paces.by_instance, seed=seed)
        found, expected = (
            Waits.of([each for each, is_counted in zip(all_of, counts, strict=True) if is_counted])
            for all_of in (served, predicted_wait)
        )
        result.figures[mode] = {
            "measured paces": [round(pace, 2) for pace in paces.by_instance],
            "served": found.rounded(),
            "simulated": expected.rounded(),
        }
        lost += sum(each is LOST for each in served)
        if mode == "default":
            apart = abs(found.in_time - expected.in_time)
    result.lines += [
        Line(
            name="interactive attainment, points apart",
            value=None if quick else apart,
            bound=MOST_POINTS,
        ),
        Line(name="lost requests", value=lost, bound=0),
    ]
    return result


def engine(pace: float) -> SimulatedSettings:
    """Settings of a simulated engine: first come, first served, in chunks of 256 tokens."""
    scaled = {each: pace * getattr(LATENCY, each) for each in LATENCY.__struct_fields__}
    return SimulatedSettings(
        latency=LatencyCoefficients(**scaled),
        policy="fcfs",
        token_budget=LIMITS.max_budget_tokens,
        max_running=LIMITS.max_running,
        kv_capacity_tokens=LIMITS.kv_capacity_tokens,
        block_tokens=LIMITS.block_tokens,
        host_kv_tokens=0,
    )


async def _through_mesh(
    mode: str, work: Sequence[RoutedArrival], broker: str | None
) -> tuple[list[ServedRequest], Paces]:
    agents = tuple(
        simulated_agent(f"i{number}", engine(SLOW if number == 0 else 1.0))
        for number in range(INSTANCES)
    )
    planner = {"grouper": {"routing": {"policy": mode}}}
    async with (
        bench_mesh(broker, agents, planner=planner) as mesh,
        bench_producer(mesh) as producer,
        measured_paces(mesh, LATENCY, INSTANCES) as paces,
    ):
        await asyncio.sleep(SETTLE_S)
        return await _serve(producer, work), paces


async def _serve(producer: Producer, work: Sequence[RoutedArrival]) -> list[ServedRequest]:
    prompts, began = Prompts(ModelName(MODEL)), time.monotonic()

    async def one(number: int, asked: RoutedArrival) -> ServedRequest:
        await asyncio.sleep(max(0.0, began + asked.arrival.arrived_at - time.monotonic()))
        request = prompts.request(number, asked)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                generation = await producer.submit(request, reply=ReplyMode.FINAL)
                final = await generation.final()
        except (TimeoutError, MeshError):
            return LOST
        if not isinstance(final, RequestCompleted):
            return LOST
        assert isinstance(request.prompt, tuple)
        prompts.answered(asked, request.prompt, final.token_ids)
        ttft_s = final.timings.first_token_at - final.timings.arrived_at
        return ServedRequest(
            attained=ttft_s <= (asked.arrival.slo.ttft_s or 0.0),
            ttft_s=ttft_s,
            prompt_tokens=final.usage.prompt_tokens,
            cached_tokens=final.usage.cached_tokens,
        )

    return list(await asyncio.gather(*(one(*each) for each in enumerate(work))))
