"""The simulated cluster with several routers, and with instances that pull."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.sim.profiles import load
from ops.sim.routing import predictors
from ops.sim.routing.cluster import RoutingCluster, RoutingOutcome, simulate_front
from ops.sim.routing.fronts import PulledQueue, Routers, RouterSeat
from ops.sim.routing.predictors import LEVELS, OraclePrefills, prefills_for, seat_of
from ops.sim.routing.workload import MIXES, RoutedArrival, RoutedTraffic
from solver.prediction.prefill.features import feature_matrix
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.routing.admission_queue import Assignment
from solver.routing.options import VARIANTS
from solver.routing.prefills import request_features
from solver.scheduling.pull_room import PullBounds
from tests.prefill_times import NOMINAL, matrix_of, requests_of, times_of

LATENCY = load("28").latency
CLUSTER = RoutingCluster(latency=LATENCY, scale=2.0)


def traffic(count: int = 120, rate_rps: float = 4.0) -> list[RoutedArrival]:
    return RoutedTraffic(
        mix=MIXES["mixed"], rate_rps=rate_rps, num_requests=count, seed=3
    ).arrivals()


def routers(count: int) -> Routers:
    seats = [RouterSeat(OraclePrefills(LATENCY, 2.0)) for _ in range(count)]
    return Routers(CLUSTER.instance_ids, VARIANTS["oracle"], seats, 0)


def pulled(cluster: RoutingCluster = CLUSTER, **bounds: float) -> PulledQueue:
    return PulledQueue(
        cluster.instance_ids,
        lambda request: 2 * LATENCY.predict_s(request.prompt_tokens, request.prompt_tokens**2, 0),
        PullBounds(**bounds),  # type: ignore[arg-type]
    )


def misses(outcome: RoutingOutcome) -> int:
    return sum(request.violated for request in outcome.requests)


@pytest.mark.parametrize("front", [routers(3), pulled()], ids=["three routers", "pulled"])
def test_every_request_is_served_once(front: Routers | PulledQueue):
    outcome = simulate_front(traffic(), CLUSTER, front)

    assert all(request.finished_at is not None for request in outcome.requests)
    assert len(outcome.assignments) == len(outcome.requests)


@pytest.mark.slow
def test_three_routers_with_shared_state_attain_about_as_much_as_one_router():
    work = traffic(400, 4.5)
    one, three = (misses(simulate_front(work, CLUSTER, routers(count))) for count in (1, 3))

    assert three <= one + 0.05 * len(work)


def row_of(assignment: Assignment) -> NDArray[np.float64]:
    return feature_matrix(request_features(assignment.request), [assignment.candidate])


@pytest.fixture
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Replace the trees by trees fitted to a formula, because these tests check only the exchange
    between routers.
    """
    known = requests_of(NOMINAL, 500, seed=1)
    trees = fit_quantile_trees(matrix_of(known), times_of(known), levels=LEVELS)
    monkeypatch.setattr(predictors, "trained", lambda _: trees)


@pytest.mark.usefixtures("_small_trees")
def test_routers_correct_by_observations_of_other_routers():
    """Prefills take three times the predicted time; the second router has observed none."""
    known = predictors.trained(2.0)
    one, other = (prefills_for(VARIANTS["quartz"], 2.0, origin=name) for name in ("one", "other"))
    outcome = simulate_front(traffic(300), CLUSTER, routers(1))
    assignments = list(outcome.assignments.values())
    last = assignments[-1]

    def predicted_s() -> list[float]:
        return [each.predict(last.request, [last.candidate])[0].mean_s for each in (one, other)]

    (raw_s, _) = predicted_s()
    for each in assignments:
        one.observe(each, 3 * float(known.predict(row_of(each)).mean_s[0]))
    seats = [seat_of(one), seat_of(other)]
    assert predicted_s() == [pytest.approx(3 * raw_s, rel=0.1), raw_s]

    for _ in range(2):
        assert seats[1].share is not None
        seats[1].share([one, one])
    assert predicted_s() == pytest.approx([3 * raw_s] * 2, rel=0.1)


def test_an_instance_never_holds_more_than_its_bounds():
    held = _HeldAtMost(pulled(window=3, max_backlog_s=1e6))
    simulate_front(traffic(200, 20.0), CLUSTER, held)

    assert held.most == 3


def test_the_earliest_deadline_is_pulled_first():
    queue = pulled(RoutingCluster(latency=LATENCY, num_instances=1), window=1)
    work = traffic(60, 20.0)
    outcome = simulate_front(work, RoutingCluster(latency=LATENCY, num_instances=1), queue)
    order = sorted(outcome.requests, key=lambda request: request.scheduled_at or 0.0)

    def due(index: int) -> float:
        arrival = order[index].arrival
        return arrival.slo.planning_deadline_at(arrival.arrived_at)

    late = order[-1]
    assert all(
        due(index) <= due(len(order) - 1)
        for index in range(len(order))
        if (order[index].scheduled_at or 0.0) > late.arrival.arrived_at
    )


def test_a_slow_instance_serves_less():
    cluster = RoutingCluster(latency=LATENCY, num_instances=2, paces=(3.0, 1.0))
    outcome = simulate_front(traffic(200, 4.0), cluster, pulled(cluster))
    served = [str(each.instance_id) for each in outcome.assignments.values()]

    assert served.count("instance 0") < served.count("instance 1")


class _HeldAtMost(PulledQueue):
    """A front that records the maximum number of requests pulled by an instance."""

    def __init__(self, inner: PulledQueue) -> None:
        self.__dict__.update(inner.__dict__)
        self.most = 0

    def dispatch(self, now: float) -> Sequence[object]:  # type: ignore[override]
        found = super().dispatch(now)
        self.most = max(self.most, *(len(each) for each in self._held.values()))
        return found
