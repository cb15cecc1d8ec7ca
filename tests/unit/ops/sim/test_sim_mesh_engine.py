"""The simulated mesh's engine, which computes several iterations in one step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.limits import BatchLimits
from ops.sim.mesh.request import MeshRequest
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import ModelName, RequestId
from shared.contracts.qos import Slo
from solver.scheduling.baselines import FixedChunkFcfs
from solver.scheduling.engine.latency import LatencyTable

TABLE = LatencyTable(tuple(0.01 + 1e-5 * n for n in range(1025)), pair_s=1e-9, context_s=1e-7)
ONE_SECOND = LatencyTable(tuple(1.0 if n else 0.0 for n in range(1025)))
FOREVER = 1e9


def arrival(at: float, prompt: int, output: int) -> Arrival:
    return Arrival(
        arrived_at=at,
        prompt_tokens=prompt,
        output_tokens=output,
        class_name="any",
        slo=Slo(ttlt_s=60),
    )


def request(number: int, prompt: int, output: int, at: float = 0.0) -> MeshRequest:
    return MeshRequest(number, arrival(at, prompt, output), ModelName("m"))


sizes = st.tuples(
    st.floats(0.0, 0.5, allow_subnormal=False), st.integers(1, 700), st.integers(1, 90)
)


@settings(deadline=None, max_examples=60)
@given(
    gaps=st.lists(sizes, min_size=1, max_size=40),
    capacity=st.sampled_from([900, 2000, 100_000]),
    max_running=st.sampled_from([2, 8, 64]),
)
def test_iterations_equal_iterations_of_the_token_by_token_replica(
    gaps: list[tuple[float, int, int]], capacity: int, max_running: int
):
    at, arrivals = 0.0, []
    for gap, prompt, output in gaps:
        at += gap
        arrivals.append(arrival(at, prompt, output))
    walked = [SimRequest(RequestId(str(n)), each) for n, each in enumerate(arrivals)]
    counted = [MeshRequest(n, each, ModelName("m")) for n, each in enumerate(arrivals)]
    limits = EngineLimits(max_running=max_running, kv_capacity_tokens=capacity, block_tokens=1)
    SimulatedReplica(FixedChunkFcfs(128), TABLE, limits).run(walked)
    engine = BatchEngine(
        TABLE,
        BatchLimits(kv_capacity_tokens=capacity, max_running=max_running, token_budget=128),
    )
    for each in counted:
        engine.catch_up(each.arrival.arrived_at)
        engine.add(each, each.arrival.arrived_at)
    engine.catch_up(FOREVER)

    assert [r.finished_at for r in walked] == pytest.approx([r.finished_at for r in counted])
    assert [r.first_token_at for r in walked] == pytest.approx([r.first_token_at for r in counted])
    assert [r.num_preempted for r in walked] == [r.num_preempted for r in counted]
    assert capacity == engine.free_tokens


def test_a_prompt_and_its_answer_take_an_iteration_each():
    """The prompt's iteration gives the first token; two more tokens take two iterations."""
    engine = BatchEngine(ONE_SECOND, BatchLimits(kv_capacity_tokens=1000))
    one = request(0, 100, 3)
    engine.add(one, 5.0)
    engine.catch_up(FOREVER)

    assert (one.first_token_at, one.finished_at) == (6.0, 8.0)
    assert engine.take_finished() == [one]
    assert engine.totals.busy_s == 3.0


def test_an_evicted_request_resumes_its_answer_and_recomputes_its_kv():
    engine = BatchEngine(ONE_SECOND, BatchLimits(kv_capacity_tokens=1000))
    one = request(0, 100, 10)
    engine.add(one, 0.0)
    engine.catch_up(4.0)
    engine.evict(engine.running()[0])

    assert (one.num_output_tokens, one.num_prefill_tokens) == (4, 104)
    assert engine.totals.wasted_tokens == 103
    assert (engine.free_tokens, engine.num_unfinished) == (1000, 0)

    engine.add(one, 10.0)
    engine.catch_up(FOREVER)

    assert one.finished_at == 16.0


def test_a_swapped_out_request_restores_its_kv():
    limits = BatchLimits(kv_capacity_tokens=1000, restore_s_per_token=0.01)
    engine = BatchEngine(ONE_SECOND, limits)
    one = request(0, 100, 10)
    engine.add(one, 0.0)
    engine.catch_up(4.0)
    engine.swap_out(engine.running()[0])

    assert (one.kept_tokens, engine.totals.wasted_tokens) == (103, 0)

    engine.add(one, 10.0)
    engine.catch_up(FOREVER)

    assert one.finished_at == pytest.approx(10.0 + 1.03 + 6.0)
    assert engine.totals.restored_tokens == 103


def test_a_static_batch_begins_together_and_ends_before_the_next():
    limits = BatchLimits(kv_capacity_tokens=10_000, static_batch=2)
    engine = BatchEngine(ONE_SECOND, limits)
    runs = [request(0, 10, 2), request(1, 10, 5), request(2, 10, 1)]
    for run in runs:
        engine.add(run, 0.0)
    engine.catch_up(FOREVER)

    assert [run.finished_at for run in runs] == [2.0, 5.0, 6.0]


def test_a_request_that_can_never_fit_is_rejected():
    engine = BatchEngine(ONE_SECOND, BatchLimits(kv_capacity_tokens=100))

    with pytest.raises(ValueError, match="does not fit"):
        engine.add(request(0, 90, 11), 0.0)


def test_a_budget_below_the_maximum_decodes_is_rejected():
    with pytest.raises(ValueError, match="budget"):
        BatchLimits(kv_capacity_tokens=100, max_running=256, token_budget=256)
