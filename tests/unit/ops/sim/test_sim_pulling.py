"""Replicas that pull from shared lanes lose no request and exceed no bound."""

from dataclasses import replace

import pytest

from ops.sim.lanes import Forecast, LaneQueues
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.profiles import load
from ops.sim.pulling import LateBoundReplica, PullingCluster, PullOptions
from ops.sim.request import Arrival, SimRequest
from ops.sim.scenario import Scenario
from ops.sim.summary import summarize, violation_share
from services.mesh.cli import main
from shared.contracts.base import RequestId
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Slo
from solver.scheduling.pull_room import PullBounds

SHORT = Scenario(
    profile=load("28"), policy="qoserve+curve", rate_rps=4.0, duration_s=60.0, pull=PullOptions()
)
UNBOUNDED = PullOptions(
    bounds=PullBounds(window=10**9, best_effort_window=10**9, max_backlog_s=1e9), round_trip_s=0.0
)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("rate_rps", [4.0, 30.0], ids=["calm", "overload"])
def test_every_request_is_served_to_its_end_exactly_once(replicas: int, rate_rps: float) -> None:
    outcome = replace(SHORT, replicas=replicas, rate_rps=rate_rps, drain=True).run()

    assert all(r.num_output_tokens == r.output_tokens for r in outcome.requests)
    assert sum(t.prefill_tokens - t.wasted_tokens for t in outcome.totals) == sum(
        r.arrival.prompt_tokens for r in outcome.requests
    )


def test_equal_pulling_scenarios_give_equal_figures() -> None:
    first, second = (summarize(replace(SHORT, replicas=2).run()) for _ in range(2))
    for figures in (first, second):
        for name in ("cpu_s", "speed"):
            del figures[name]

    assert first == second


@pytest.mark.parametrize("rate_rps", [3.0, 8.0])
def test_one_replica_without_bounds_equals_full_visibility(rate_rps: float) -> None:
    scenario = replace(SHORT, rate_rps=rate_rps)
    pulled = replace(scenario, pull=UNBOUNDED).run()
    full = replace(scenario, pull=None).run()

    assert [r.finished_at for r in full.requests] == [r.finished_at for r in pulled.requests]


def test_a_replica_never_exceeds_its_window_or_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = []
    free = []
    iterate = LateBoundReplica.iterate

    def watched(replica: LateBoundReplica, now: float) -> float:
        waiting.append(replica.num_waiting)
        duration_s = iterate(replica, now)
        free.append(replica.free_blocks)
        return duration_s

    monkeypatch.setattr(LateBoundReplica, "iterate", watched)
    pull = PullOptions(bounds=PullBounds(window=5, max_backlog_s=1e9))
    replace(SHORT, rate_rps=30.0, pull=pull, kv_capacity_tokens=40_000, drain=True).run()

    assert 0 < max(waiting) <= 5
    assert min(free) >= 0


def test_a_small_window_keeps_most_of_full_visibility_in_overload() -> None:
    scenario = replace(SHORT, rate_rps=12.0, duration_s=120.0)
    pulled, full = (
        1 - violation_share(replace(scenario, pull=pull).run().requests)
        for pull in (PullOptions(), None)
    )

    assert pulled >= 0.9 * full


def test_infeasible_requests_give_way_to_feasible_ones() -> None:
    """A long, infeasible request is relegated; the short requests behind it are not."""
    infeasible = Arrival(
        arrived_at=0.0, prompt_tokens=8000, output_tokens=4, class_name="x", slo=Slo(ttft_s=0.2)
    )
    short = replace(infeasible, prompt_tokens=200, slo=Slo(ttft_s=1.0))
    requests = [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate([infeasible, *[short] * 8])
    ]
    profile = load("28")
    replica = LateBoundReplica(
        policy_factory("qoserve+curve")(profile.latency), profile.latency, EngineLimits()
    )
    forecast = Forecast(requests, profile.latency)
    PullingCluster([replica], PullOptions(), forecast, max_running=256).run(requests)

    assert [r.violated for r in requests] == [True, *[False] * 8]
    assert all(r.finished_at is not None for r in requests)


def test_lanes_are_fifo_by_band_and_work() -> None:
    arrival = Arrival(
        arrived_at=0.0, prompt_tokens=100, output_tokens=8, class_name="x", slo=Slo(ttft_s=6)
    )
    arrivals = [arrival, replace(arrival, prompt_tokens=5000), arrival]
    requests = [SimRequest(RequestId(str(n)), each) for n, each in enumerate(arrivals)]
    lanes = LaneQueues(LaneLayout(), Forecast(requests, load("28").latency))
    queues = [lanes.put(request, 0.0) for request in requests]

    assert queues[0] == queues[2] != queues[1]
    assert [lanes.take(queues[0]) for _ in range(3)] == [requests[0], requests[2], None]


def test_silos_do_not_pull() -> None:
    assert main(["simulate", "--dispatch", "pull", "--silo", "1:1:1"]) == 2
    assert main(["simulate", "--window", "4", "--silo", "1:1:1"]) == 2
    assert main(["simulate", "--work-classes", "4", "--dispatch", "round-robin"]) == 2
