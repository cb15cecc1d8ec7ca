"""Co-serving workloads and their figures."""

import numpy as np
import pytest

from ops.baselines.scheduling.co_serving import NonPreemptive
from ops.bench.conserve_cells import Cell, measure
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.offline import DATASETS, CoServing, TimedRequest, by_mean
from ops.sim.policies import policy_factory
from ops.sim.profiles import load
from ops.sim.request import Arrival
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.latency import LatencyTable

CHAT = Slo(ttft_s=0.5, tbt_s=0.07)


def replica(policy: str) -> SimulatedReplica:
    profile = load("h100")
    limits = EngineLimits(kv_capacity_tokens=profile.kv_capacity_tokens)
    return SimulatedReplica(policy_factory(policy)(profile.latency), profile.latency, limits)


@pytest.mark.parametrize(("mean", "p99"), [(21776, 29306), (6916, 12084), (166, 754)])
def test_lengths_have_the_published_mean_and_percentile(mean: float, p99: float) -> None:
    drawn = by_mean(mean, p99).draw(np.random.default_rng(0), 100_000)

    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert np.quantile(drawn, 0.99) == pytest.approx(p99, rel=0.02)


def test_gaps_are_the_actual_times_between_tokens() -> None:
    arrival = Arrival(arrived_at=0.0, prompt_tokens=1, output_tokens=3, class_name="*", slo=CHAT)
    request = TimedRequest(RequestId("0"), arrival)
    for now in (1.0, 1.25, 2.0):
        request.generate(now)

    assert request.gaps_s == [0.25, 0.75]


def test_online_traffic_does_not_depend_on_the_backlog() -> None:
    mixed = CoServing(slo=CHAT, duration_s=20, seed=3)
    single = CoServing(slo=CHAT, duration_s=20, seed=3, datasets=("VCSUM",))

    assert [r.arrival for r in mixed.online()] == [r.arrival for r in single.online()]


def test_the_backlog_has_all_data_sets_and_waits_from_the_start() -> None:
    offline = CoServing(slo=CHAT, duration_s=100).offline()
    prompts = [r.arrival.prompt_tokens for r in offline]
    means = [model[0].draw(np.random.default_rng(0), 10_000) for model in DATASETS.values()]

    assert {r.arrival.arrived_at for r in offline} == {0.0}
    assert np.mean(prompts) == pytest.approx(np.mean(means), rel=0.1)


def test_throughput_and_waste_add_up_to_the_computed_tokens() -> None:
    """Computed tokens are offline tokens, each counted once, wasted tokens and online tokens."""
    harvest = CoServing(slo=CHAT, rate_rps=4, duration_s=20).run(replica("sarathi-preemptive:2048"))
    figures = harvest.figures()
    online = sum(r.num_computed_tokens for r in harvest.online)
    offline = figures["offline_tps"] * harvest.end_s
    wasted = figures["wasted_tps"] * harvest.end_s

    assert online + offline + wasted == pytest.approx(harvest.replica.totals.tokens)


def test_a_backlog_of_which_less_than_half_is_left_is_an_error() -> None:
    """Without waiting offline work, offline throughput would be meaningless."""
    latency = LatencyTable(tuple(1e-8 * n for n in range(2049)))
    fast = SimulatedReplica(NonPreemptive(2048), latency, EngineLimits())
    with pytest.raises(RuntimeError, match="less than half"):
        CoServing(slo=CHAT, duration_s=5).run(fast)


def test_targets_are_multiples_of_online_only_latencies() -> None:
    """At low rates, targets derive from latencies at 2 requests per second."""
    cell = Cell(figure="6a", systems=("ours",), rate_rps=1.0, duration_s=10.0)
    measured = measure(cell)

    assert set(measured) == {"online-only", "ours"}
    assert measured["online-only"]["offline_tps"] == 0
    assert measured["ours"]["offline_tps"] > 5000
    assert measured["ours"]["tbt_attainment"] > 0.99
