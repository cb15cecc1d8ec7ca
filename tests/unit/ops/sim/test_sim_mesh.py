"""The mesh of instances and models in virtual time."""

import pytest

from ops.sim.mesh.arms import ARMS
from ops.sim.mesh.cluster import MeshOptions, MeshOutcome, ModelArrival, simulate_mesh
from ops.sim.mesh.conduct import Conduct
from ops.sim.mesh.instance import MeshInstance
from ops.sim.mesh.kinds import A10, A100, LLAMA_70B, MISTRAL_7B, VICUNA_13B, Fleet, served
from ops.sim.mesh.lanes import AnswerLengths, MeshLanes
from ops.sim.mesh.request import MeshRequest
from ops.sim.mesh.weights import HostWeights
from ops.sim.mesh.workload import MeshTraffic, classes, many_models, tailed
from ops.sim.request import Arrival
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import LaneQuota, Segment
from shared.contracts.qos import Slo

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
TWO = {A: MISTRAL_7B, B: VICUNA_13B}


def arrival(at: float = 0.0, prompt: int = 100, output: int = 50, ttlt_s: float = 600) -> Arrival:
    return Arrival(
        arrived_at=at,
        prompt_tokens=prompt,
        output_tokens=output,
        class_name="any",
        slo=Slo(ttlt_s=ttlt_s),
    )


def small(arm: str, seed: int = 0) -> MeshOutcome:
    kinds, shares = many_models(2, 3, 0.4, sizes=(MISTRAL_7B, VICUNA_13B))
    traffic = MeshTraffic(models=shares, rate_rps=4.0, duration_s=8.0, seed=seed)
    fleet = Fleet(devices=(A100, A100), models=kinds)
    made = ARMS[arm]
    options = MeshOptions(fleet=fleet, conduct=made.conduct, planner=made.planner(0, 4.0))
    return simulate_mesh(traffic.arrivals(), options)


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_every_request_is_served_once_and_whole(arm: str):
    outcome = small(arm)

    assert outcome.requests
    for request in outcome.requests:
        assert request.instance_id is not None
        assert request.finished_at is not None
        assert request.first_token_at is not None
        assert request.arrival.arrived_at < request.first_token_at <= request.finished_at
        assert request.output_tokens == request.num_output_tokens
    useful = sum(r.arrival.prompt_tokens + r.output_tokens - 1 for r in outcome.requests)
    assert useful == outcome.tokens - outcome.wasted_tokens


@pytest.mark.parametrize(("prompt", "output"), [(700, 1), (50, 200), (100, 20)])
def test_an_instance_that_holds_all_requests_serves_its_models_one_by_one(prompt: int, output: int):
    made = ARMS["no pulling"]
    options = MeshOptions(
        fleet=Fleet(devices=(A100,), models=TWO),
        conduct=made.conduct,
        planner=made.planner(0, 4.0),
        until_s=1000.0,
    )
    one = arrival(prompt=prompt, output=output)
    arrivals = [ModelArrival(model=model, arrival=one) for model in (A, B, A, B)]
    outcome = simulate_mesh(arrivals, options)

    assert all(each.finished_at is not None for each in outcome.requests)


@pytest.mark.slow
def test_equal_seeds_give_equal_runs():
    first, second = small("qlm"), small("qlm")

    assert [r.finished_at for r in first.requests] == [r.finished_at for r in second.requests]
    assert [r.finished_at for r in first.requests] != [
        r.finished_at for r in small("qlm", seed=1).requests
    ]


class Rig:
    """One simulated instance, and lanes with requests."""

    def __init__(self, conduct: Conduct, *requests: tuple[ModelName, Arrival]) -> None:
        self.requests = [MeshRequest(n, each, model) for n, (model, each) in enumerate(requests)]
        self.lanes = MeshLanes(AnswerLengths(self.requests))
        self.instance = MeshInstance(
            InstanceId("one"),
            A100,
            Fleet(devices=(A100,), models=TWO),
            self.lanes,
            conduct,
            max_running=128,
            initial=A,
        )
        for request in self.requests:
            self.lanes.put(request, request.arrival.arrived_at)

    def follow(self, now: float, *models: ModelName) -> None:
        segments = []
        for model in models:
            lanes = sorted({each.lane for each in self.requests if each.model == model})
            quotas = tuple(LaneQuota(lane=lane, quota=1000) for lane in lanes)
            segments.append(Segment(model=model, lanes=quotas))
        self.instance.get_ready(now)
        self.instance.follow(segments, now)

    def run(self, until: float) -> None:
        while (at := self.instance.wake_at()) < until:
            self.instance.wake(at)


def test_a_swap_costs_its_time_and_only_one_model_is_active():
    rig = Rig(Conduct(), (B, arrival()))
    rig.follow(0.0, B)

    assert (rig.instance.active, rig.instance.engine) == (None, None)
    assert rig.instance.wake_at() == VICUNA_13B.warm_s

    rig.run(VICUNA_13B.warm_s + 1e-6)

    assert rig.instance.active == B
    assert rig.instance.num_swaps == 1

    rig.run(1000.0)

    how = served(VICUNA_13B, A100)
    assert how is not None
    assert rig.requests[0].first_token_at == pytest.approx(
        VICUNA_13B.warm_s + how.latency.predict_s(100, 5000.0, 0)
    )


def test_a_cold_model_takes_longer_than_a_warm_model():
    warm, cold = (HostWeights(TWO, budget_bytes=budget, swap_scale=0.5) for budget in (1 << 50, 0))

    assert warm.activate_s(B, 0.0) == 0.5 * VICUNA_13B.warm_s
    assert cold.activate_s(B, 0.0) == 0.5 * VICUNA_13B.cold_s

    cold.warm(B, 10.0)

    assert cold.activate_s(B, 10.0) == pytest.approx(0.5 * VICUNA_13B.cold_s)
    assert cold.activate_s(B, 100.0) == 0.5 * VICUNA_13B.warm_s


def test_host_memory_is_not_exceeded():
    weights = HostWeights(
        TWO | {C: LLAMA_70B}, budget_bytes=MISTRAL_7B.weight_bytes, swap_scale=1.0
    )

    assert weights.activate_s(A, 0.0) == MISTRAL_7B.warm_s
    assert weights.activate_s(B, 0.0) == VICUNA_13B.cold_s


def test_the_window_is_not_exceeded():
    long = [(A, arrival(prompt=400, output=400)) for _ in range(400)]
    rig = Rig(Conduct(window=5), *long)
    rig.follow(0.0, A)

    assert rig.instance.engine is not None
    assert rig.instance.engine.num_waiting == 5
    assert rig.lanes.num_waiting == 395

    rig.run(10.0)

    assert rig.instance.engine.num_waiting <= 5
    assert rig.instance.engine.num_running > 5


def test_stock_engines_finish_the_active_model_in_the_window_then_swap():
    stock = ARMS["fcfs"].conduct
    rig = Rig(stock, (A, arrival()), (B, arrival()), (A, arrival()))
    rig.follow(0.0, A, B, A)
    rig.run(1000.0)

    first, second, third = rig.requests
    assert rig.instance.num_swaps == 1
    assert first.finished_at == third.finished_at
    assert second.first_token_at is not None
    assert third.finished_at is not None
    assert second.first_token_at > third.finished_at + VICUNA_13B.warm_s


def test_work_displaced_by_a_new_head_keeps_its_answer():
    """
    When model B becomes the head, requests of A that exceed the drain limit are evicted.
    """
    rig = Rig(
        Conduct(drain_limit_s=0.0),
        (A, arrival(output=2000, ttlt_s=3000)),
        (A, arrival(output=2000, ttlt_s=3000)),
        (B, arrival(ttlt_s=300)),
    )
    rig.follow(0.0, A)
    rig.run(5.0)
    rig.follow(5.0, B, A)
    rig.run(5.01)

    assert [r.num_evicted for r in rig.requests] == [1, 1, 0]
    assert rig.requests[0].num_output_tokens > 100
    assert rig.lanes.num_waiting == 3

    rig.run(2000.0)

    assert [r.num_output_tokens for r in rig.requests[:2]] == [2000, 2000]
    assert rig.requests[2].finished_at < rig.requests[0].finished_at


def test_infeasible_requests_are_relegated():
    rig = Rig(Conduct(), (A, arrival(ttlt_s=0.01)), (A, arrival(ttlt_s=100)))
    rig.follow(0.0, A)

    assert [r.relegated for r in rig.requests] == [True, False]

    rig.run(1000.0)

    assert all(r.finished_at is not None for r in rig.requests)


def test_an_a10_is_slower_holds_less_and_cannot_serve_every_model():
    fast, slow = served(MISTRAL_7B, A100), served(MISTRAL_7B, A10)
    assert fast is not None
    assert slow is not None

    assert slow.latency.predict_s(256, 0, 0) == pytest.approx(3 * fast.latency.predict_s(256, 0, 0))
    assert slow.kv_capacity_tokens < fast.kv_capacity_tokens / 3
    assert served(LLAMA_70B, A10) is None


def test_tail_models_share_the_remaining_arrivals():
    frequent, rare = tailed(4, 8, 0.5)

    assert sum(frequent) + sum(rare) == pytest.approx(1.0)
    assert sum(rare) == pytest.approx(0.5 * sum(frequent))


def test_traffic_has_the_requested_shares():
    traffic = MeshTraffic(
        models={A: 1.0}, rate_rps=50.0, duration_s=100.0, interactive=0.3, mega=0.1
    )
    made = traffic.arrivals()
    names = [each.arrival.class_name for each in made]
    mega = [each for each in made if each.arrival.prompt_tokens >= 3000]

    assert names.count("interactive") / len(names) == pytest.approx(0.3, abs=0.03)
    assert len(mega) / len(made) == pytest.approx(0.1, abs=0.02)
    assert sum(each.share for each in classes(0.3)) == pytest.approx(1.0)


def test_traffic_may_consist_of_the_initial_queue_only():
    traffic = MeshTraffic(models={A: 1.0}, rate_rps=0.0, duration_s=10.0, queue=3)

    assert [each.arrival.arrived_at for each in traffic.arrivals()] == [0.0, 0.0, 0.0]


def test_arrivals_keep_their_order():
    made: list[ModelArrival] = MeshTraffic(
        models={A: 1.0}, rate_rps=5.0, duration_s=10.0
    ).arrivals()
    times = [each.arrival.arrived_at for each in made]

    assert times == sorted(times)
