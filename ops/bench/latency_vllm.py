"""Iterations of vLLM on this machine's CPU, as input of the latency benchmark."""

import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ops.bench.engine_arms import LARGEST_BUDGET, OURS, Arm, engines
from ops.bench.engine_load import Planned, planned_load, serve, serve_alone
from ops.bench.progress import say
from services.agent.backends.base import EngineBackend
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import Seconds
from shared.contracts.qos import Slo
from shared.contracts.telemetry import EngineIteration
from shared.models.tiny_weights import TinyArchitecture

UTILIZATION = 1.2
"""Load on vLLM, as a multiple of the throughput of one request at a time."""
SLOS = {"Q1": Slo(ttft_s=2.0, tbt_s=0.1), "Q2": Slo(ttlt_s=20.0), "Q3": Slo(ttlt_s=60.0)}
"""SLOs of the load on vLLM; with these SLOs, the policy chooses chunks of many sizes."""
SMALL = TinyArchitecture(
    architecture="LlamaForCausalLM",
    model_type="llama",
    seed=1,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
)
"""
Model for vLLM with random weights.

A decode takes 6 ms, mostly in the layers. A decode of a tiny model takes 2 ms, mostly in Python.
This time is up to 50 % longer in the ten iterations after a prefill, and varies by 25 % with the
caches of a shared processor.
"""
_ALONE = 6
_DRAIN_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Telemetry of a real engine: iterations, and times in which its threads ran and waited."""

    iterations: list[EngineIteration]
    waiting_share: float
    """Share of the time in which the engine's runnable main threads waited for a CPU."""


async def vllm_steps(*, seed: int, loads: int, duration_s: Seconds) -> list[Measured]:
    """
    Iterations of vLLM on this machine's CPU with a small model, decodes and prefills mixed.

    Args:
        seed: Seed of the first load; each further load adds 1 to the seed.
        loads: Number of consecutive loads.
        duration_s: Duration of each load.
    """
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        async with engines(Path(directory), SMALL) as engine:
            await Arm(model=OURS, token_budget=LARGEST_BUDGET).activate(engine)
            rate_rps = UTILIZATION * await _alone_rps(engine, seed)
            measured: list[Measured] = []
            for number in range(loads):
                say(f"vLLM, load {number + 1} of {loads}: {rate_rps:.1f} requests per second")
                load = planned_load(seed=seed + number, rate_rps=rate_rps, duration_s=duration_s)
                measured.append(await _measure(engine, load))
            return measured


async def _measure(engine: VllmEngine, load: list[Planned]) -> Measured:
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
    """Total times that the main threads of a process group have run and have waited for a CPU."""
    ran_ns = waited_ns = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                ran, waited, _ = (stat.parent / "schedstat").read_text().split()
                ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return 1e-9 * ran_ns, 1e-9 * waited_ns


async def _alone_rps(engine: EngineBackend, seed: int) -> float:
    """Throughput in requests per second when requests are served one at a time, after a warm-up."""
    load = planned_load(seed=seed + 2000, rate_rps=1.0, duration_s=6.0 * _ALONE)[: 2 * _ALONE]
    await serve_alone(engine, OURS, load[:_ALONE])
    begun = time.perf_counter()
    served = await serve_alone(engine, OURS, load[_ALONE:])
    return len(served) / (time.perf_counter() - begun)


async def _collect(engine: EngineBackend, seen: list[EngineIteration]) -> None:
    """Collect iterations from the engine before it overwrites them."""
    while True:
        seen += engine.drain_iterations()
        await asyncio.sleep(_DRAIN_PERIOD_S)
