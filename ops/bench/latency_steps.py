"""Iterations that the latency benchmark learns from: of simulated engines, and of vLLM here."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from ops.bench.engine_arms import LARGEST_BUDGET, OURS, Arm, engines
from ops.bench.engine_load import planned_load, serve, serve_alone
from ops.bench.progress import say
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.profiles import NamedProfile
from ops.sim.request import SimRequest
from ops.sim.routing.engine import NOISE
from ops.sim.scenario import Scenario
from ops.sim.work import Work
from services.agent.backends.base import EngineBackend
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.qos import Slo
from shared.contracts.telemetry import EngineIteration

RATES_RPS = {"A100-80GB": 3.0, "H100-80GB": 6.0}
"""About what one replica of the device serves of the conversation mix."""
UTILIZATION = 1.2
"""Of the load on vLLM, as a share of what one request at a time gives."""
SLOS = {"Q1": Slo(ttft_s=2.0, tbt_s=0.1), "Q2": Slo(ttlt_s=20.0), "Q3": Slo(ttlt_s=60.0)}
"""On vLLM; between them chunks are of many sizes."""
_ALONE = 6
_DRAIN_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated iteration."""

    iteration: EngineIteration
    """As telemetry reports it, with noise."""
    exact_s: Seconds
    """What the profile says that it takes."""
    chunk: tuple[int, int] | None
    """Tokens of its one prefill, and those computed of it before; none if it has not just one."""


class NoisyReplica(SimulatedReplica):
    """The simulated engine with the noise of `ops.sim.routing`; keeps what it computed."""

    def __init__(self, profile: NamedProfile, policy: str, random: np.random.Generator) -> None:
        super().__init__(
            policy_factory(policy)(profile.latency),
            profile.latency,
            EngineLimits(kv_capacity_tokens=profile.kv_capacity_tokens),
        )
        self._random = random
        self.steps: list[Step] = []

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:
        exact_s, work = super()._compute(now, work)
        duration_s = exact_s * float(np.exp(self._random.normal(0.0, NOISE)))
        if work.tokens:
            chunks = [(count, run.num_computed_tokens) for run, count in work.prefills]
            iteration = EngineIteration(
                compute_tokens=work.tokens,
                context_tokens=work.context_tokens,
                num_decodes=len(work.decodes),
                duration_s=duration_s,
                prefill_pairs=work.pairs,
            )
            self.steps.append(Step(iteration, exact_s, chunks[0] if len(chunks) == 1 else None))
        return duration_s, work


def simulated_steps(
    profile: NamedProfile, device: str, *, seed: int, duration_s: Seconds
) -> list[Step]:
    """Of one replica under the default policy and a mix of chats, QoServe's classes."""
    scenario = Scenario(
        profile=profile,
        policy="qoserve",
        rate_rps=RATES_RPS[device],
        duration_s=duration_s,
        lengths="conversation",
        seed=seed,
    )
    replica = NoisyReplica(profile, scenario.policy, np.random.default_rng(seed + 1))
    requests = [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate(scenario.workload())
    ]
    replica.run(requests, until=duration_s)
    return replica.steps


@dataclass(frozen=True, slots=True)
class Measured:
    """Telemetry of a real engine."""

    iterations: list[EngineIteration]
    waiting_share: float
    """Of the time that the engine's main threads could have run: they waited for a CPU."""


async def vllm_steps(*, seed: int, duration_s: Seconds) -> Measured:
    """Of vLLM on this machine's CPU with a tiny model, decodes and prefills mixed."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        async with engines(Path(directory)) as engine:
            await Arm(model=OURS, token_budget=LARGEST_BUDGET).activate(engine)
            rate_rps = UTILIZATION * await _alone_rps(engine, seed)
            say(f"vLLM: {rate_rps:.1f} requests a second for {duration_s:g} s")
            load = planned_load(seed=seed, rate_rps=rate_rps, duration_s=duration_s)
            engine.drain_iterations()
            before = scheduled_s(engine.host_pid or -1)
            seen: list[EngineIteration] = []
            collecting = asyncio.create_task(_collect(engine, seen))
            try:
                await serve(engine, OURS, load, SLOS)
            finally:
                collecting.cancel()
                await asyncio.gather(collecting, return_exceptions=True)
            after = scheduled_s(engine.host_pid or -1)
            ran_s, waited_s = (late - early for early, late in zip(before, after, strict=True))
            iterations = [*seen, *engine.drain_iterations()]
            return Measured(iterations, waited_s / max(1e-9, ran_s + waited_s))


def scheduled_s(group: int) -> tuple[Seconds, Seconds]:
    """What the main threads of a process group have run, and waited for a CPU, so far."""
    ran_ns = waited_ns = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                ran, waited, _ = (stat.parent / "schedstat").read_text().split()
                ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return 1e-9 * ran_ns, 1e-9 * waited_ns


async def _alone_rps(engine: EngineBackend, seed: int) -> float:
    """Requests a second, one after the other; the first ones warm the engine up."""
    load = planned_load(seed=seed + 2000, rate_rps=1.0, duration_s=6.0 * _ALONE)[: 2 * _ALONE]
    await serve_alone(engine, OURS, load[:_ALONE])
    begun = time.perf_counter()
    served = await serve_alone(engine, OURS, load[_ALONE:])
    return len(served) / (time.perf_counter() - begun)


async def _collect(engine: EngineBackend, seen: list[EngineIteration]) -> None:
    """Before the engine writes over them."""
    while True:
        seen += engine.drain_iterations()
        await asyncio.sleep(_DRAIN_PERIOD_S)


def disturbed(
    iterations: Sequence[EngineIteration], *, share: float, seed: int
) -> list[EngineIteration]:
    """A *share* of them takes 2 to 20 times as long."""
    random = np.random.default_rng(seed)
    factors = np.where(
        random.random(len(iterations)) < share, random.uniform(2, 20, len(iterations)), 1.0
    )
    return [
        structs.replace(each, duration_s=each.duration_s * float(factor))
        for each, factor in zip(iterations, factors, strict=True)
    ]
