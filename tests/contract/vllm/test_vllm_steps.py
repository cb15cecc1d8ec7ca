"""The simulated engine computes the same iterations as real vLLM."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import Arrival, SimRequest
from services.agent.backends.policies import free_tokens
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName, Seconds
from shared.contracts.qos import Slo
from solver.scheduling.engine.decision import BatchState, IterationDecision, RequestView
from solver.scheduling.engine.latency import LatencyTable
from tests.contract.engine.engines import (
    LLAMA,
    EngineRig,
    greedy,
    prompt_of,
    tiny_entries,
    vllm_rig,
)
from tests.contract.vllm.recorded_engines import (
    BLOCK_TOKENS,
    MAX_RUNNING,
    MAX_TOKENS,
    NUM_BLOCKS,
    recorded_policy,
)
from tests.contract.vllm.recording import PATH_VARIABLE, RecordingPolicy, Step, read_steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

SCHEDULERS = {"fcfs": "RecordedFcfs", "edf": "RecordedEdf", "qoserve": "RecordedQoserve"}
OUTPUTS = (1, 7, 16, 40, 90)
NUM_REQUESTS = 40
LOADS = (
    *((0.03, 1.0), (0.01, 1.0), (0.0, 1.0), (0.01, 0.5), (0.02, 2.0)),
    *((0.0, 2.0), (0.06, 3.0), (0.1, 9.0), (0.2, 30.0)),
)
"""
Loads: seconds between requests, and factor of the requests' targets.

The test uses the first load that overloads the machine and still leaves some slack.
"""


@dataclass
class RecordedEngine:
    """A vLLM engine, and the file to which its schedulers write."""

    rig: EngineRig
    path: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecordedEngine]:
    directory = tmp_path_factory.mktemp("models")
    kill = vllm_rig(directory).kill  # without vLLM, the test is skipped or fails
    base = next(each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    limits = {
        "max_model_len": 1024,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_num_seqs": MAX_RUNNING,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "enable_prefix_caching": False,
    }
    entries = tuple(
        msgspec.structs.replace(
            base,
            name=ModelName(name),
            max_model_len=1024,
            engine_args=limits
            | {"scheduler_cls": f"tests.contract.vllm.recording_scheduler.{scheduler}"},
        )
        for name, scheduler in SCHEDULERS.items()
    )
    settings = VllmSettings(log_path=str(directory / "vllm.log"), warm_bytes=0)
    with pytest.MonkeyPatch.context() as patch:
        path = directory / "steps.jsonl"
        patch.setenv(PATH_VARIABLE, str(path))
        rig = EngineRig(VllmEngine(entries, settings), kill)
        await rig.engine.start()
        yield RecordedEngine(rig, path)
        await rig.engine.close()


@pytest.mark.parametrize("name", SCHEDULERS)
async def test_the_simulated_engine_repeats_vllms_iterations(
    engine: RecordedEngine, name: str
) -> None:
    await engine.rig.bring_up(ModelName(name))
    engine.path.unlink(missing_ok=True)

    steps, outputs = await record_useful_loads(engine, name)

    expected = [step.counts for step in steps]
    assert [step.counts for step in replay(name, steps, outputs)] == expected


async def record_useful_loads(
    engine: RecordedEngine, name: str
) -> tuple[list[Step], dict[str, int]]:
    """
    Record loads until one exercises the policy; return iterations and answer lengths of all loads.

    The recording begins at the engine's start, because the policy learns pace and answer lengths.
    """
    outputs: dict[str, int] = {}
    for pause_s, scale in LOADS:
        outputs |= await record_load(engine.rig, ModelName(name), targets(scale), pause_s=pause_s)
        steps = read_steps(engine.path)
        if says_much(name, steps, num_requests=len(outputs)):
            return steps, outputs
    pytest.fail("no request lost its KV, or none was held: the comparison would prove little")


def targets(scale: float) -> Sequence[Slo]:
    """Targets of many kinds, scaled by *scale*; the last target cannot be met."""
    return (
        Slo(ttft_s=scale, tbt_s=0.03 * scale),
        Slo(ttlt_s=4.0 * scale),
        Slo(ttft_s=0.4 * scale, tbt_s=0.02 * scale),
        Slo(),
        Slo(ttlt_s=0.01),
    )


def says_much(name: str, steps: Sequence[Step], *, num_requests: int) -> bool:
    """True if requests lost their KV and, with a policy that holds prefills, some were held."""
    readmitted = sum(len(step.admitted) for step in steps) > num_requests
    preempted = any(step.preempted for step in steps)
    rested = name != "qoserve" or any(step.num_held for step in steps)
    return readmitted and preempted and rested


async def record_load(
    rig: EngineRig, model: ModelName, slos: Sequence[Slo], *, pause_s: Seconds
) -> dict[str, int]:
    """Serve mixed requests that arrive over time; return their answer lengths by id."""
    outputs: dict[str, int] = {}
    async with asyncio.timeout(180), asyncio.TaskGroup() as group:
        for index in range(NUM_REQUESTS):
            request = rig.request(
                prompt_of(20 + 137 * index % 700, first=index),
                greedy(OUTPUTS[index % len(OUTPUTS)]),
                model=model,
                slo=slos[index % 7 % len(slos)],
                arrived_at=time.time(),
            )
            outputs[request.request_id] = OUTPUTS[index % len(OUTPUTS)]
            group.create_task(rig.answer(request))
            await asyncio.sleep(pause_s if index % 8 else 3 * pause_s)
    await rig.settled()
    return outputs


class Replayed(RecordingPolicy):
    """Policy that gets recorded inputs instead of inputs that the simulated engine lacks."""

    views: dict[str, RequestView]

    def add(self, request: RequestView) -> None:
        super().add(self.views[request.request_id])

    def decide(self, now: float, batch: BatchState) -> IterationDecision:
        free = free_tokens(batch.free_kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        return super().decide(now, replace(batch, free_kv_tokens=free))


def replay(name: str, steps: list[Step], outputs: dict[str, int]) -> list[Step]:
    """Iterations of the simulated engine with the recorded arrivals."""
    policy = Replayed(recorded_policy(name), durations=[step.duration_s for step in steps])
    policy.views = {view.request_id: view for step in steps for view in step.added}
    engine = SimulatedReplica(
        policy,
        LatencyTable((0.0, 0.001)),
        EngineLimits(
            max_running=MAX_RUNNING,
            max_budget_tokens=MAX_TOKENS,
            kv_capacity_tokens=(NUM_BLOCKS - 1) * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
        ),
    )
    for step in steps:
        for view in step.added:
            arrival = Arrival(
                arrived_at=view.arrived_at,
                prompt_tokens=view.prompt_tokens,
                output_tokens=outputs[view.request_id.rpartition("-")[0]],
                class_name=view.application,
                slo=view.slo,
            )
            engine.add(SimRequest(view.request_id, arrival))
        engine.iterate(step.now)
    return policy.steps
