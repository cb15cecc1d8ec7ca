"""A mesh over RabbitMQ in which groups behind queues of several lengths are served."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ops.bench.completion_forecasts import PassedGroup
from ops.bench.completion_load import BATCH, MeshSize, ModelLoad
from ops.bench.cores import OtherLoad, agent_pids, give_cores
from ops.bench.meshes import bench_mesh, bench_producer
from services.agent.backends.settings import SimulatedSettings
from services.mesh.spec import AgentSpec
from shared.contracts.base import ModelName, Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.calibration.completion_calibration import PredictedTime

MODELS = tuple(ModelName(name) for name in ("tiny-llama", "tiny-qwen"))
LEARNT_S = 10.0
"""Time span of telemetry before a forecast, from which the predicted throughput mostly follows."""
MOST_OTHERS = 0.12
"""
Largest CPU share of other processes; RabbitMQ, the kernel and this benchmark's monitoring use
about half of this share.
"""
SETTLE_S = 2.0
"""Time within which a new leader makes its first plan."""
_SIMULATED = SimulatedSettings(
    latency=LatencyCoefficients(constant_s=0.0025, linear_s=2e-5, context_s=2e-7),
    policy="fcfs",
    max_running=BATCH,
)
_VLLM: dict[str, Any] = {"policy": "fcfs", "max_running": BATCH, "prefix_caching": False}


def agents(engine: str) -> tuple[AgentSpec, ...]:
    """One agent for each model. An agent serves only its model, first come, first served."""
    settings = msgspec.to_builtins(_SIMULATED) if engine == "simulated" else _VLLM
    return tuple(
        AgentSpec(
            instance_id=f"i{number}",
            engine=engine,
            settings={"models": [model], "initial_model": model, "engine": {engine: settings}},
        )
        for number, model in enumerate(MODELS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOutcome:
    """Results of the groups of the two models."""

    passed: list[PassedGroup]
    by_mesh: list[tuple[PredictedTime, Seconds]]
    lost: int
    quiet: list[PassedGroup]
    """The groups of requests during whose wait other processes used little CPU time."""
    others_share: float
    """Share of this machine's CPU time used by other processes, including RabbitMQ."""


async def serve(broker: str | None, *, engine: str, load: MeshSize, seed: int) -> MeshOutcome:
    """Serve groups of the two models in a separate mesh."""
    async with (
        bench_mesh(broker, agents(engine)) as mesh,
        bench_producer(mesh) as producer,
    ):
        give_cores(agent_pids(mesh))
        await asyncio.sleep(SETTLE_S)
        loads = [
            ModelLoad(producer=producer, model=model, seed=seed + number)
            for number, model in enumerate(MODELS)
        ]
        others, began_at = OtherLoad(), time.time()
        following = asyncio.create_task(others.follow())
        try:
            passed = await asyncio.gather(*(each.serve(load) for each in loads))
        finally:
            following.cancel()
        others.sample()
    everything = [each for of in passed for each in of]
    return MeshOutcome(
        passed=everything,
        quiet=[each for each in everything if _beside(each, others) <= MOST_OTHERS],
        by_mesh=[each for model in loads for each in model.by_mesh],
        lost=sum(each.lost for each in loads),
        others_share=others.share(began_at, time.time()),
    )


def _beside(passed: PassedGroup, others: OtherLoad) -> float:
    """CPU share of other processes, from the telemetry before a forecast to the end of the wait."""
    since = passed.came_at - LEARNT_S
    return others.share(since, passed.came_at + passed.wait_s)
