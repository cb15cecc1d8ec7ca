"""Several routers, and instances that pull: the simulated cluster before other fronts."""

from collections.abc import Sequence

import pytest

from ops.sim.profiles import load
from ops.sim.routing.cluster import RoutingCluster, RoutingOutcome, simulate_front
from ops.sim.routing.fronts import PulledQueue, Routers, RouterSeat
from ops.sim.routing.predictors import OraclePrefills
from ops.sim.routing.workload import MIXES, RoutedArrival, RoutedTraffic
from solver.routing.options import VARIANTS
from solver.scheduling.pull_room import PullBounds

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
def test_everything_is_served_once(front: Routers | PulledQueue):
    outcome = simulate_front(traffic(), CLUSTER, front)

    assert all(request.finished_at is not None for request in outcome.requests)
    assert len(outcome.assignments) == len(outcome.requests)


def test_three_routers_that_tell_each_other_do_about_as_well_as_one():
    work = traffic(400, 4.5)
    one, three = (misses(simulate_front(work, CLUSTER, routers(count))) for count in (1, 3))

    assert three <= one + 0.05 * len(work)


def test_an_instance_never_holds_more_than_its_bounds_allow():
    held = _HeldAtMost(pulled(window=3, max_backlog_s=1e6))
    simulate_front(traffic(200, 20.0), CLUSTER, held)

    assert held.most == 3


def test_what_is_due_first_is_pulled_first():
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
    """Remembers the most that any instance held."""

    def __init__(self, inner: PulledQueue) -> None:
        self.__dict__.update(inner.__dict__)
        self.most = 0

    def dispatch(self, now: float) -> Sequence[object]:  # type: ignore[override]
        found = super().dispatch(now)
        self.most = max(self.most, *(len(each) for each in self._held.values()))
        return found
