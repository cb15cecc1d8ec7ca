"""Forecasts for the next request of a lane: by a plan, and updated until the request arrives."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import LaneForecast
from solver.planning.forecast import (
    empty_lane_forecasts,
    forecast_now,
    lane_forecasts,
    late_with,
    retry_after_s,
)
from solver.planning.orders.queues import order_of
from solver.planning.problem.grouping import Spread
from solver.planning.problem.snapshot import (
    DEFAULT_RATE_ERROR,
    ClusterSnapshot,
    InstanceView,
    ServiceRates,
    planning_problem,
)
from tests.unit.solver.planning.groups import a_group

A, B = ModelName("a"), ModelName("b")
WEIGHTS = {"low": 1.0}
LANE = a_group(A).key.queue_name
RATES = ServiceRates(
    token_rate_per_s=100.0, rate_error=0.1, prefill_s=Spread(0.5, 0.25), decode_s_per_token=0.01
)
"""With these rates, ten requests of 100 tokens are 10 s of work."""


def instance(name: str = "i", backlog_s: float = 0.0) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(name),
        device="d",
        active=A,
        activate_s={A: 0.0, B: 1.0},
        backlog_s=Spread(backlog_s),
    )


def cluster(*instances: InstanceView, num_groups: int = 3) -> ClusterSnapshot:
    return ClusterSnapshot(
        now=100.0,
        groups=tuple(a_group(A, number) for number in range(num_groups)),
        instances=instances or (instance(),),
        rates={("d", model): RATES for model in (A, B)},
    )


def predicted_wait(snapshot: ClusterSnapshot, *queues: list[int]) -> tuple[LaneForecast, ...]:
    """Forecasts by a plan with the given queues of groups, one for each instance."""
    problem = planning_problem(snapshot, importance_weight=WEIGHTS)
    return lane_forecasts(snapshot, problem, order_of(queues))


class TestLanesInAPlan:
    @given(st.permutations(range(3)))
    def test_the_next_request_waits_for_all_groups_of_its_lane(self, order: list[int]):
        (lane,) = predicted_wait(cluster(), order)

        assert lane.lane == LANE
        assert lane.wait_s == pytest.approx(30.0)
        assert lane.request_s == pytest.approx(1.0)
        assert lane.tail_s == pytest.approx(0.5 + 20 * 0.01)

    @pytest.mark.parametrize(
        ("overflow", "wait_s"), [(0, 30.0), (5, 25.0), (10, 20.0), (28, 2.0), (30, 0.0), (99, 0.0)]
    )
    def test_the_next_request_passes_overflow(self, overflow: int, wait_s: float):
        (lane,) = predicted_wait(replace(cluster(), overflow={LANE: overflow}), [0, 1, 2])

        assert lane.wait_s == pytest.approx(wait_s)

    def test_an_instance_with_less_work_does_not_shorten_the_wait(self):
        """New requests are served by an instance with two groups and an instance with one group."""
        (lane,) = predicted_wait(cluster(instance("i"), instance("j")), [0, 2], [1])

        assert lane.wait_s == pytest.approx(20.0)
        assert lane.request_s == pytest.approx(0.5)

    def test_all_instances_with_the_model_serve_new_requests(self):
        """As in an empty lane, a single waiting request does not slow later requests."""
        four = [instance(name) for name in "ijkl"]
        snapshot = replace(cluster(*four), groups=(a_group(A, num_requests=1),))
        (lane,) = predicted_wait(snapshot, [0], [], [], [])

        assert lane.request_s == pytest.approx(1.0 / 4)

    def test_pulled_work_comes_first(self):
        (lane,) = predicted_wait(cluster(instance(backlog_s=7.0)), [0, 1, 2])

        assert lane.wait_s == pytest.approx(37.0)

    def test_the_spread_comes_from_earlier_work_and_the_throughput(self):
        (lane,) = predicted_wait(cluster(), [0, 1, 2])

        work_sd_s = np.sqrt(3 * 10 * (30.0**2 + 40.0**2)) / 100
        assert lane.wait_sd_s == pytest.approx(np.hypot(work_sd_s, 0.1 * 30.0), rel=0.02)

    def test_a_lane_without_an_instance_has_no_wait(self):
        snapshot = replace(cluster(), groups=(a_group(ModelName("c")),))
        (lane,) = predicted_wait(snapshot, [])

        assert (lane.wait_s, lane.wait_sd_s) == (None, None)
        assert lane.late_probability == 1.0


class TestEmptyLanes:
    def forecasts(self, *instances: InstanceView, model: ModelName = A) -> tuple[LaneForecast, ...]:
        snapshot = replace(cluster(*instances), groups=())
        typical = [a_group(model, num_requests=1)]
        order = order_of([[] for _ in snapshot.instances])
        return empty_lane_forecasts(snapshot, order, typical, importance_weight=WEIGHTS)

    def test_the_next_request_waits_for_work_pulled_by_the_first_free_instance(self):
        (lane,) = self.forecasts(instance("i", 5.0), instance("j", 2.0))

        assert lane.wait_s == pytest.approx(2.0)
        assert lane.wait_sd_s == pytest.approx(0.2)
        assert lane.request_s == pytest.approx(0.5)
        assert lane.late_probability == 0.0

    def test_inactive_models_have_no_empty_lane_forecast(self):
        assert self.forecasts(instance(), model=B) == ()

    def test_without_empty_lanes_there_are_no_forecasts(self):
        order = order_of([[0, 1, 2]])

        assert empty_lane_forecasts(cluster(), order, [], importance_weight=WEIGHTS) == ()

    def test_planned_work_with_no_later_deadline_precedes_the_next_request(self):
        """The plan has three groups of 10 s, due after 60 s; 2 s of work are pulled."""
        snapshot, order = cluster(instance(backlog_s=2.0)), order_of([[0, 1, 2]])
        typical = [
            a_group(A, num_requests=1, oldest_deadline_at=at, youngest_deadline_at=at)
            for at in (110.0, 200.0)
        ]
        sooner, later = empty_lane_forecasts(snapshot, order, typical, importance_weight=WEIGHTS)

        assert (sooner.wait_s, later.wait_s) == (pytest.approx(2.0), pytest.approx(32.0))


REPORTED = LaneForecast(
    lane=LANE, wait_s=10.0, wait_sd_s=2.0, request_s=0.5, tail_s=1.0, tail_sd_s=1.5
)


class TestSinceThePlan:
    def test_forecast_now_subtracts_service_and_adds_arrivals(self):
        now = forecast_now(REPORTED, age_s=4.0, came=[(2.0, 6)])

        assert now.wait_s == pytest.approx(10.0 - 4.0 + 3.0)
        assert now.wait_sd_s == pytest.approx(2.0 + 3.0 * DEFAULT_RATE_ERROR)

    def test_the_updated_wait_is_never_negative(self):
        assert forecast_now(REPORTED, age_s=60.0, came=()).wait_s == 0.0
        assert forecast_now(REPORTED, age_s=60.0, came=[(0.0, 2)]).wait_s == pytest.approx(1.0)

    def test_new_arrivals_are_also_worked_off(self):
        """In an idle lane with one request of 0.5 s per second, no wait builds up."""
        idle = LaneForecast(lane=LANE, wait_s=0.0, wait_sd_s=0.0, request_s=0.5)
        steady = [(9.0 - n, 9.0 - n) for n in range(9)]

        assert forecast_now(idle, age_s=9.5, came=steady).wait_s == 0.0
        assert forecast_now(idle, age_s=9.5, came=[*steady, (0.0, 4)]).wait_s == pytest.approx(2.0)

    def test_an_unknown_wait_stays_unknown(self):
        unserved = LaneForecast(lane=LANE, late_probability=1.0)

        assert forecast_now(unserved, age_s=4.0, came=[(2.0, 6)]) is unserved

    def test_a_missing_spread_from_an_older_leader_stays_missing(self):
        reported = LaneForecast(lane=LANE, wait_s=10.0, request_s=0.5)

        assert forecast_now(reported, age_s=4.0, came=[(2.0, 6)]).wait_sd_s is None

    @given(age_s=st.floats(0, 100), came=st.integers(0, 100), more=st.integers(1, 100))
    def test_more_arrivals_never_shorten_the_wait(self, age_s: float, came: int, more: int):
        first, second = (
            forecast_now(REPORTED, age_s=age_s, came=[(0.0, n)]) for n in (came, came + more)
        )

        assert first.wait_s is not None
        assert second.wait_s is not None
        assert 0 <= first.wait_s < second.wait_s


class TestLateness:
    @pytest.mark.parametrize(
        ("left_s", "late"), [(11.0, 0.5), (13.5, 0.1587), (8.5, 0.8413), (60.0, 0.0)]
    )
    def test_wait_and_tail_must_fit_into_the_time_left(self, left_s: float, late: float):
        """Wait and tail have a mean of 11 s in total and a deviation of 2.5 s."""
        assert late_with(REPORTED, left_s) == pytest.approx(late, abs=1e-4)

    def test_without_spread_the_probability_is_zero_or_one(self):
        exact = LaneForecast(lane=LANE, wait_s=10.0, wait_sd_s=0.0)

        assert (late_with(exact, 10.5), late_with(exact, 9.5)) == (0.0, 1.0)

    @pytest.mark.parametrize("wait_s", [None, 10.0])
    def test_without_a_wait_or_spread_the_last_groups_probability_counts(
        self, wait_s: float | None
    ):
        assert late_with(LaneForecast(lane=LANE, wait_s=wait_s, late_probability=0.25), 1.0) == 0.25

    @pytest.mark.parametrize(
        ("left_s", "retry_s"), [(4.0, 7.0), (0.5, 10.0), (-5.0, 10.0), (60.0, 1.0)]
    )
    def test_retry_after_is_when_the_request_would_be_in_time(self, left_s: float, retry_s: float):
        """A request that would be late without a wait may retry when the lane is empty."""
        assert retry_after_s(REPORTED, left_s) == pytest.approx(retry_s)
