"""Keeping a plan: running groups stay, arrivals join, and moves are counted."""

import numpy as np
import pytest

from ops.bench.planner_instances import instance, urgent_arrivals
from ops.bench.planner_keeping import kept, num_moved, total_cost
from solver.planning.orders.rules import edf_batching
from tests.planning_problems import Group, Instance, a_problem, an_order, queues_of

BUSY = Instance(active=0)
NEW = (-1, -1)


def test_running_groups_keep_their_place() -> None:
    groups = [Group() for _ in range(5)]
    running = [(1, 0), (0, 1), (0, 0), (1, 1), NEW]

    queues = queues_of(kept(a_problem(groups, [BUSY, BUSY], running=running)))

    without_arrival = [[group for group in queue if group != 4] for queue in queues]
    assert without_arrival == [[2, 1], [0, 3]]
    assert sorted(group for queue in queues for group in queue) == [0, 1, 2, 3, 4]


def test_urgent_arrivals_join_at_a_head_and_other_arrivals_at_an_end() -> None:
    running = [(0, 0), (0, 1), NEW]
    old = [Group(deadline_s=12), Group(deadline_s=22)]

    urgent = a_problem([*old, Group(deadline_s=5, weight=9)], [BUSY], running=running)
    calm = a_problem([*old, Group(deadline_s=500, weight=9)], [BUSY], running=running)

    assert queues_of(kept(urgent)) == [[2, 0, 1]]
    assert queues_of(kept(calm)) == [[0, 1, 2]]


def test_keeping_moves_no_group_and_replanning_moves_groups() -> None:
    before = instance(0, 60, 4, 4)
    problem = urgent_arrivals(before, edf_batching(before), 16, seed=1)

    keeping = kept(problem)

    assert num_moved(problem, keeping) == 0
    assert num_moved(problem, edf_batching(problem)) > 0
    assert np.sort(keeping.groups).tolist() == list(range(76))


def test_an_arrival_does_not_count_as_moved() -> None:
    late = Group(deadline_s=-1)
    problem = a_problem([late, late], [BUSY, BUSY], running=[(0, 0), NEW])

    assert num_moved(problem, an_order([0], [1])) == 0
    assert num_moved(problem, an_order([1], [0])) == 1


def test_a_group_that_is_late_nowhere_does_not_count_as_moved() -> None:
    problem = a_problem([Group()], [BUSY, BUSY], running=[(0, 0)])

    assert num_moved(problem, an_order([], [0])) == 0


def test_a_plan_without_one_group_has_no_cost() -> None:
    problem = a_problem([Group(), Group()], [BUSY])

    with pytest.raises(ValueError, match="exactly once"):
        total_cost(problem, an_order([0]))
