"""PolyServe's TBT bins."""

import pytest

from ops.baselines.scheduling.polyserve import PolyServe, tbt_bin_s
from ops.sim.cluster import Pool, simulate
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.latency import LatencyTable

LATENCY = LatencyTable(tuple(0.005 + 1e-4 * n for n in range(4097)))
BINS_S = (0.02, 0.05, 0.1)


@pytest.mark.parametrize(
    ("tbt_s", "bin_s"), [(0.05, 0.05), (0.07, 0.05), (0.1, 0.1), (5.0, 0.1), (0.001, 0.02)]
)
def test_a_request_is_in_the_slowest_bin_that_keeps_its_pace(tbt_s: float, bin_s: float) -> None:
    assert tbt_bin_s(Slo(ttft_s=6, tbt_s=tbt_s), BINS_S) == bin_s


def test_a_request_without_a_pace_is_in_the_slowest_bin() -> None:
    assert tbt_bin_s(Slo(ttlt_s=600), BINS_S) == 0.1


def arrivals(*, tbt_s: float, name: str, count: int = 20) -> list[Arrival]:
    slo = Slo(ttft_s=6, tbt_s=tbt_s)
    return [
        Arrival(arrived_at=0.1 * n, prompt_tokens=1000, output_tokens=20, class_name=name, slo=slo)
        for n in range(count)
    ]


def longest_iteration_s(policy: PolyServe) -> float:
    replica = SimulatedReplica(policy, LATENCY, EngineLimits(), record=True)
    replica.run(
        [
            SimRequest(RequestId(str(n)), arrival)
            for n, arrival in enumerate(arrivals(tbt_s=0.05, name="any"))
        ]
    )
    return max(LATENCY.tokens_s[tokens] for tokens, _ in replica.totals.steps)


@pytest.mark.parametrize("bin_s", BINS_S)
def test_iterations_of_an_engine_last_as_long_as_its_bin_allows(bin_s: float) -> None:
    longest_s = longest_iteration_s(PolyServe(LATENCY, bin_s=bin_s))

    assert bin_s - 1e-4 < longest_s <= bin_s


def test_bins_are_separate_pools() -> None:
    """Each engine has the pace of one class; classes do not share slack."""
    outcome = simulate(
        sorted(
            arrivals(tbt_s=0.051, name="Q1") + arrivals(tbt_s=0.101, name="Q2"),
            key=lambda arrival: arrival.arrived_at,
        ),
        [
            Pool(num_replicas=1, factory=policy_factory("polyserve:50"), classes=frozenset({"Q1"})),
            Pool(
                num_replicas=1, factory=policy_factory("polyserve:100"), classes=frozenset({"Q2"})
            ),
        ],
        latency=LATENCY,
        limits=EngineLimits(),
        drain=True,
    )

    assert len(outcome.totals) == 2
    assert [r.num_gaps_over for r in outcome.requests] == [0] * 40
