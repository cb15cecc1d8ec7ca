"""What a plan promises to the next request of a lane, and what becomes of that until it comes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import LaneForecast
from solver.planning.building import (
    DEFAULT_RATE_ERROR,
    ClusterSnapshot,
    InstanceView,
    ServiceRates,
    planning_problem,
)
from solver.planning.forecast import (
    empty_lane_forecasts,
    forecast_now,
    lane_forecasts,
    late_with,
    retry_after_s,
)
from solver.planning.grouping import Spread
from solver.planning.order_baselines.queues import order_of
from tests.unit.solver.planning.groups import a_group

A, B = ModelName("a"), ModelName("b")
WEIGHTS = {"low": 1.0}
LANE = a_group(A).key.queue_name
RATES = ServiceRates(
    token_rate_per_s=100.0, rate_error=0.1, prefill_s=Spread(0.5, 0.25), decode_s_per_token=0.01
)
"""Ten requests of a hundred tokens are ten seconds of work."""


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


def foretold(snapshot: ClusterSnapshot, *queues: list[int]) -> tuple[LaneForecast, ...]:
    """By a plan in which instances have these groups in this order."""
    problem = planning_problem(snapshot, tier_weight=WEIGHTS)
    return lane_forecasts(snapshot, problem, order_of(queues))


class TestLanesInAPlan:
    @given(st.permutations(range(3)))
    def test_who_comes_next_waits_for_all_groups_of_the_lane_in_whatever_order(
        self, order: list[int]
    ):
        (lane,) = foretold(cluster(), order)

        assert lane.lane == LANE
        assert lane.wait_s == pytest.approx(30.0)
        assert lane.request_s == pytest.approx(1.0)
        assert lane.tail_s == pytest.approx(0.5 + 20 * 0.01)

    @pytest.mark.parametrize(
        ("overflow", "wait_s"), [(0, 30.0), (5, 25.0), (10, 20.0), (28, 2.0), (30, 0.0), (99, 0.0)]
    )
    def test_who_comes_next_passes_what_is_above_its_tenants_share(
        self, overflow: int, wait_s: float
    ):
        (lane,) = foretold(replace(cluster(), overflow={LANE: overflow}), [0, 1, 2])

        assert lane.wait_s == pytest.approx(wait_s)

    def test_an_instance_that_is_done_earlier_makes_the_lane_no_faster_to_end(self):
        """Two groups on one instance, one on the other, and both take what comes."""
        (lane,) = foretold(cluster(instance("i"), instance("j")), [0, 2], [1])

        assert lane.wait_s == pytest.approx(20.0)
        assert lane.request_s == pytest.approx(0.5)

    def test_all_instances_that_have_the_model_serve_what_comes(self):
        """As in an empty lane: one request that waits there makes those after it no slower."""
        four = [instance(name) for name in "ijkl"]
        snapshot = replace(cluster(*four), groups=(a_group(A, num_requests=1),))
        (lane,) = foretold(snapshot, [0], [], [], [])

        assert lane.request_s == pytest.approx(1.0 / 4)

    def test_what_was_pulled_before_comes_first(self):
        (lane,) = foretold(cluster(instance(backlog_s=7.0)), [0, 1, 2])

        assert lane.wait_s == pytest.approx(37.0)

    def test_the_spread_is_of_the_work_before_and_of_the_throughput(self):
        (lane,) = foretold(cluster(), [0, 1, 2])

        work_sd_s = np.sqrt(3 * 10 * (30.0**2 + 40.0**2)) / 100
        assert lane.wait_sd_s == pytest.approx(np.hypot(work_sd_s, 0.1 * 30.0), rel=0.02)

    def test_a_lane_that_nobody_serves_has_no_wait(self):
        snapshot = replace(cluster(), groups=(a_group(ModelName("c")),))
        (lane,) = foretold(snapshot, [])

        assert (lane.wait_s, lane.wait_sd_s) == (None, None)
        assert lane.late_probability == 1.0


class TestEmptyLanes:
    def forecasts(self, *instances: InstanceView, model: ModelName = A) -> tuple[LaneForecast, ...]:
        snapshot = replace(cluster(*instances), groups=())
        typical = [a_group(model, num_requests=1)]
        order = order_of([[] for _ in snapshot.instances])
        return empty_lane_forecasts(snapshot, order, typical, tier_weight=WEIGHTS)

    def test_who_comes_next_waits_for_what_the_first_free_instance_has_pulled(self):
        (lane,) = self.forecasts(instance("i", 5.0), instance("j", 2.0))

        assert lane.wait_s == pytest.approx(2.0)
        assert lane.wait_sd_s == pytest.approx(0.2)
        assert lane.request_s == pytest.approx(0.5)
        assert lane.late_probability == 0.0

    def test_models_that_nobody_has_active_are_left_to_plans(self):
        assert self.forecasts(instance(), model=B) == ()

    def test_without_such_lanes_there_is_nothing_to_tell(self):
        order = order_of([[0, 1, 2]])

        assert empty_lane_forecasts(cluster(), order, [], tier_weight=WEIGHTS) == ()

    def test_what_other_lanes_have_there_goes_before_if_it_is_no_later(self):
        """Three groups of ten seconds, due after 60 s; and 2 s that were pulled."""
        snapshot, order = cluster(instance(backlog_s=2.0)), order_of([[0, 1, 2]])
        typical = [
            a_group(A, num_requests=1, oldest_deadline_at=at, youngest_deadline_at=at)
            for at in (110.0, 200.0)
        ]
        sooner, later = empty_lane_forecasts(snapshot, order, typical, tier_weight=WEIGHTS)

        assert (sooner.wait_s, later.wait_s) == (pytest.approx(2.0), pytest.approx(32.0))


TOLD = LaneForecast(lane=LANE, wait_s=10.0, wait_sd_s=2.0, request_s=0.5, tail_s=1.0, tail_sd_s=1.5)


class TestSinceThePlan:
    def test_instances_went_on_and_requests_came(self):
        now = forecast_now(TOLD, age_s=4.0, came=[(2.0, 6)])

        assert now.wait_s == pytest.approx(10.0 - 4.0 + 3.0)
        assert now.wait_sd_s == pytest.approx(2.0 + 3.0 * DEFAULT_RATE_ERROR)

    def test_a_lane_is_empty_at_most(self):
        assert forecast_now(TOLD, age_s=60.0, came=()).wait_s == 0.0
        assert forecast_now(TOLD, age_s=60.0, came=[(0.0, 2)]).wait_s == pytest.approx(1.0)

    def test_what_came_is_worked_off_too(self):
        """An idle lane with one request a second that takes half of it is never full."""
        idle = LaneForecast(lane=LANE, wait_s=0.0, wait_sd_s=0.0, request_s=0.5)
        steady = [(9.0 - n, 9.0 - n) for n in range(9)]

        assert forecast_now(idle, age_s=9.5, came=steady).wait_s == 0.0
        assert forecast_now(idle, age_s=9.5, came=[*steady, (0.0, 4)]).wait_s == pytest.approx(2.0)

    def test_a_wait_that_is_not_known_stays_so(self):
        unserved = LaneForecast(lane=LANE, late_probability=1.0)

        assert forecast_now(unserved, age_s=4.0, came=[(2.0, 6)]) is unserved

    def test_so_does_a_spread_that_an_older_leader_does_not_tell(self):
        told = LaneForecast(lane=LANE, wait_s=10.0, request_s=0.5)

        assert forecast_now(told, age_s=4.0, came=[(2.0, 6)]).wait_sd_s is None

    @given(age_s=st.floats(0, 100), came=st.integers(0, 100), more=st.integers(1, 100))
    def test_more_that_came_is_never_a_shorter_wait(self, age_s: float, came: int, more: int):
        first, second = (
            forecast_now(TOLD, age_s=age_s, came=[(0.0, n)]) for n in (came, came + more)
        )

        assert first.wait_s is not None
        assert second.wait_s is not None
        assert 0 <= first.wait_s < second.wait_s


class TestLateness:
    @pytest.mark.parametrize(
        ("left_s", "late"), [(11.0, 0.5), (13.5, 0.1587), (8.5, 0.8413), (60.0, 0.0)]
    )
    def test_the_wait_and_what_follows_it_must_fit_into_the_time_left(
        self, left_s: float, late: float
    ):
        """11 s in the mean, deviation 2.5."""
        assert late_with(TOLD, left_s) == pytest.approx(late, abs=1e-4)

    def test_without_any_spread_it_is_one_or_the_other(self):
        exact = LaneForecast(lane=LANE, wait_s=10.0, wait_sd_s=0.0)

        assert (late_with(exact, 10.5), late_with(exact, 9.5)) == (0.0, 1.0)

    @pytest.mark.parametrize("wait_s", [None, 10.0])
    def test_without_a_wait_or_its_spread_the_lanes_last_group_tells(self, wait_s: float | None):
        assert late_with(LaneForecast(lane=LANE, wait_s=wait_s, late_probability=0.25), 1.0) == 0.25

    @pytest.mark.parametrize(
        ("left_s", "retry_s"), [(4.0, 7.0), (0.5, 10.0), (-5.0, 10.0), (60.0, 1.0)]
    )
    def test_who_is_refused_is_told_when_there_is_time_for_it_again(
        self, left_s: float, retry_s: float
    ):
        """Or, where no wait would be in time, when the lane has been worked off."""
        assert retry_after_s(TOLD, left_s) == pytest.approx(retry_s)
