"""QLM's other targets."""

import numpy as np
import pytest

from solver.planning.modes import MAX_PRIORITIES, strict_priorities, waiting_time_only
from solver.planning.objective import plan_cost
from tests.planning_problems import Group, Instance, a_problem, an_order


def test_with_waiting_slos_what_comes_after_its_turn_makes_nothing_late():
    problem = a_problem([Group(deadline_s=15.0, tail_s=50.0, tail_var=9.0)], [Instance(active=0)])

    waiting = waiting_time_only(problem)

    assert plan_cost(problem, an_order([0])).late_share == 1.0
    assert plan_cost(waiting, an_order([0])).late_share == 0.0


def test_a_higher_priority_goes_first_whatever_deadlines_say():
    groups = [Group(deadline_s=1.0, weight=1000.0), Group()]
    problem = strict_priorities(
        a_problem(groups, [Instance(active=0)]), np.array([2, 1], dtype=np.int32)
    )

    low_first, high_first = (plan_cost(problem, an_order(q)).total for q in ([0, 1], [1, 0]))

    assert high_first < low_first


def test_a_swap_for_the_higher_priority_comes_before_work_of_a_lower_one():
    """Ten low groups of the active model wait for one high group of another model."""
    groups = [Group(model=1), *(Group() for _ in range(10))]
    priority = np.array([0] + [1] * 10, dtype=np.int32)
    problem = strict_priorities(a_problem(groups, [Instance(active=0)]), priority)
    low = list(range(1, 11))

    assert (
        plan_cost(problem, an_order([0, *low])).total
        < plan_cost(problem, an_order([*low, 0])).total
    )


def test_within_a_priority_short_work_goes_first():
    problem = strict_priorities(
        a_problem([Group(work_s=20.0), Group(work_s=5.0)], [Instance(active=0)]),
        np.array([1, 1], dtype=np.int32),
    )

    assert plan_cost(problem, an_order([1, 0])).total < plan_cost(problem, an_order([0, 1])).total


def test_more_priorities_than_can_be_told_apart_are_refused():
    problem = a_problem([Group() for _ in range(MAX_PRIORITIES + 1)])

    with pytest.raises(ValueError, match="priorities"):
        strict_priorities(problem, np.arange(MAX_PRIORITIES + 1, dtype=np.int32))
