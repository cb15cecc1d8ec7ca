"""The simulator's engine computes the same iterations as the simulated backend."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import Arrival, SimRequest
from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.core import SimulatedEngineCore
from shared.contracts.base import ModelName, RequestId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import Sampling
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs
from solver.scheduling.engine.decision import BatchState, IterationDecision, SchedulingPolicy
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import VARIANTS
from solver.scheduling.engine.qoserve import QoServePolicy

BUDGET, RUNNING, KV = 64, 8, 512
LATENCY = LatencyCoefficients(constant_s=0.005, linear_s=1e-4, context_s=1e-6)
TABLE = LatencyTable.from_coefficients(LATENCY, max_tokens=BUDGET)
ENTRY = ModelEntry(name=ModelName("m"), path="", architecture="", max_model_len=KV)


class Chancy:
    """A policy that holds and caps prefills by a hash, so that several are partially computed."""

    def __init__(self) -> None:
        self._queue = FixedChunkFcfs(48)
        self._turn = 0
        self.add, self.remove, self.observe = (
            self._queue.add, self._queue.remove, self._queue.observe,
        )  # fmt: skip

    def decide(self, now: float, batch: BatchState) -> IterationDecision:
        self._turn += 1
        prefills = [run.request_id for run in batch.running if run.is_prefill]
        # Pause prefills only while enough memory is free: paused prefills that fill the memory
        # would block all requests.
        rest = self._turn % 3 if batch.free_kv_tokens >= KV // 2 else 0
        held = prefills[:rest] if len(prefills) > rest else []
        return IterationDecision(
            order=self._queue.decide(now, batch).order,
            token_budget=48,
            per_request_cap=(None, 7, 20)[self._turn % 3],
            held=frozenset(held),
        )


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": lambda: FixedChunkFcfs(48),
    "chancy": Chancy,
    "edf": lambda: FixedChunkEdf(48),
    "qoserve": lambda: QoServePolicy(TABLE, VARIANTS["qoserve"]),
    "dc+er": lambda: QoServePolicy(TABLE, VARIANTS["dc+er"]),
}
REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 1),  # arrival
        st.integers(1, 300),  # prompt
        st.integers(1, 60),  # answer
        st.sampled_from([0.05, 0.5, 20.0]),  # TTFT target
    ),
    min_size=1,
    max_size=12,
)


def steps_of_the_core(
    policy: SchedulingPolicy, rows: list[tuple[float, int, int, float]]
) -> list[tuple[int, int]]:
    core = SimulatedEngineCore(
        ENTRY,
        SimulatedSettings(
            latency=LATENCY, token_budget=BUDGET, max_running=RUNNING, kv_capacity_tokens=KV
        ),
        policy,
    )
    # A preempted request would find its own freed blocks again; the simulator has no prefixes.
    core.memory.pool.cached_prefix = lambda _hashes: []  # type: ignore[method-assign]  # switched off
    pending = [
        EngineRequest(
            request_id=RequestId(str(number)),
            model=ENTRY.name,
            # A unique first token for each, so that no prefix is shared.
            prompt=(number + 100, *range(10, 9 + prompt)),
            sampling=Sampling(max_tokens=answer, temperature=0, ignore_eos=True),
            slo=Slo(ttft_s=ttft_s, tbt_s=0.02),
            arrived_at=arrived_at,
        )
        for number, (arrived_at, prompt, answer, ttft_s) in enumerate(rows)
    ]
    steps = []
    now = 0.0
    while pending or core.num_running + core.num_waiting:
        if not core.num_running + core.num_waiting:
            now = max(now, pending[0].arrived_at)
        while pending and pending[0].arrived_at <= now:
            core.add(pending.pop(0))
        result = core.iterate(now)
        assert result.iteration is not None
        steps.append((result.iteration.compute_tokens, result.iteration.num_decodes))
        now += result.duration_s
    return steps


def steps_of_the_simulator(
    policy: SchedulingPolicy, rows: list[tuple[float, int, int, float]]
) -> list[tuple[int, int]]:
    replica = SimulatedReplica(
        policy,
        TABLE,
        EngineLimits(max_running=RUNNING, max_budget_tokens=BUDGET, kv_capacity_tokens=KV),
        record=True,
    )
    replica.run(
        [
            SimRequest(
                RequestId(str(number)),
                Arrival(
                    arrived_at=arrived_at,
                    prompt_tokens=prompt,
                    output_tokens=answer,
                    class_name="*",
                    slo=Slo(ttft_s=ttft_s, tbt_s=0.02),
                ),
            )
            for number, (arrived_at, prompt, answer, ttft_s) in enumerate(rows)
        ]
    )
    return replica.totals.steps


@pytest.mark.parametrize("name", POLICIES)
@given(rows=REQUESTS)
def test_both_engines_compute_the_same_tokens_in_each_iteration(
    name: str, rows: list[tuple[float, int, int, float]]
) -> None:
    rows = sorted(rows)

    assert steps_of_the_simulator(POLICIES[name](), rows) == steps_of_the_core(
        POLICIES[name](), rows
    )


def test_memory_pressure_is_part_of_the_comparison() -> None:
    rows = [(0.0, 120, 60, 20.0)] * 8
    replica = SimulatedReplica(
        FixedChunkFcfs(48),
        TABLE,
        EngineLimits(max_running=RUNNING, max_budget_tokens=BUDGET, kv_capacity_tokens=KV),
    )
    replica.run(
        [
            SimRequest(
                RequestId(str(number)),
                Arrival(
                    arrived_at=0.0,
                    prompt_tokens=row[1],
                    output_tokens=row[2],
                    class_name="*",
                    slo=Slo(),
                ),
            )
            for number, row in enumerate(rows)
        ]
    )

    assert replica.totals.num_preempted > 0
    assert steps_of_the_simulator(FixedChunkFcfs(48), rows) == steps_of_the_core(
        FixedChunkFcfs(48), rows
    )
