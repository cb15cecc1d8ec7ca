"""Cost of a group's alternative places, compared with the cost of plans with this change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.planning.explanation import OtherPlace, PlacedGroup, explain
from solver.planning.problem.objective import plan_cost
from solver.planning.problem.problem import NONE, PlanningProblem, QueueOrder
from tests.planning_problems import (
    NEVER,
    Group,
    Instance,
    a_problem,
    a_random_order,
    a_random_problem,
    an_order,
)

TWO = (Instance(active=0), Instance(active=0))


def moved(problem: PlanningProblem, order: QueueOrder, group: int, place: OtherPlace) -> QueueOrder:
    """*order* with the group moved to *place*."""
    queues = [
        [int(each) for each in order.queue(index) if each != group]
        for index in range(problem.num_instances)
    ]
    queues[place.instance].insert(place.position, group)
    return an_order(*queues)


def of(placed: tuple[PlacedGroup, ...], group: int) -> PlacedGroup:
    return next(each for each in placed if each.group == group)


class TestPlaces:
    def test_the_likeliest_to_be_late_comes_first(self):
        problem = a_problem([Group(), Group(deadline_s=1.0), Group(deadline_s=500.0)], TWO)
        placed = explain(problem, an_order([0, 1], [2]), most=0)

        assert [each.group for each in placed] == [1, 0, 2]
        assert [(each.instance, each.position) for each in placed] == [(0, 1), (0, 0), (1, 0)]
        assert [each.turn_s for each in placed] == [10.0, 0.0, 0.0]

    def test_the_uncertainty_of_a_turn_is_that_of_the_work_before(self):
        """The work before is two groups of 10 s with variance 4, with a rate error of 10 %."""
        problem = a_problem([Group(work_var=4.0)] * 3, rate_error=0.1)
        placed = explain(problem, an_order([0, 1, 2]), most=0)

        assert of(placed, 0).turn_sd_s == 0.0
        assert of(placed, 2).turn_sd_s == pytest.approx((2 * 4.0 + 2.0**2) ** 0.5)

    def test_groups_without_a_permitted_instance_have_no_position(self):
        problem = a_problem(
            [Group(model=1, deadline_s=1.0)], [Instance(activate_s=(5.0, NEVER), active=0)]
        )
        (placed,) = explain(problem, an_order([]), most=9)

        assert (placed.instance, placed.turn_s, placed.late_probability) == (NONE, np.inf, 1.0)
        assert placed.turn_sd_s == np.inf
        assert placed.others == ()


class TestOtherPlaces:
    def test_the_position_on_a_free_instance_costs_less(self):
        """Behind another group, half of the group is late; on the free instance, none."""
        problem = a_problem([Group(), Group(deadline_s=15.0)], TWO)
        placed = of(explain(problem, an_order([0, 1], []), most=2), 1)
        best = placed.others[0]

        assert best.extra_cost < -0.2
        assert (best.turn_s, placed.turn_s) == (0.0, 10.0)

    def test_a_position_that_needs_a_swap_costs_more(self):
        problem = a_problem([Group(deadline_s=12.0)], (Instance(active=0), Instance(active=1)))
        placed = of(explain(problem, an_order([0], []), most=1), 0)
        (other,) = placed.others

        assert (other.instance, other.turn_s) == (1, 5.0)
        assert other.extra_cost > 0

    def test_other_places_are_computed_only_for_the_requested_number(self):
        problem = a_problem([Group(deadline_s=1.0), Group(deadline_s=2.0)], TWO)
        placed = explain(problem, an_order([0], [1]), most=1)

        assert [bool(each.others) for each in placed] == [True, False]

    @settings(max_examples=30)
    @given(st.integers(0, 10_000))
    def test_the_extra_cost_equals_the_changed_plans_extra_cost(self, seed: int):
        problem = a_random_problem(seed, num_groups=7, num_instances=3, num_models=2)
        order = a_random_order(problem, seed)
        now = plan_cost(problem, order).total
        for placed in explain(problem, order, most=4):
            for other in placed.others:
                there = plan_cost(problem, moved(problem, order, placed.group, other)).total

                assert other.extra_cost == pytest.approx(there - now, abs=1e-9)
