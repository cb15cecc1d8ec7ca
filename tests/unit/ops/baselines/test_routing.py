"""Plans of the routing library are never worse than their start, and better in clear cases."""

from math import inf

import pytest

from ops.baselines.planning.vehicle_routing import routed
from ops.bench.planner_instances import instance
from solver.planning.orders.rules import edf, edf_batching
from solver.planning.problem.objective import plan_cost
from tests.planning_problems import (
    Group,
    Instance,
    a_problem,
    a_random_order,
    a_random_problem,
    an_order,
    queues_of,
)


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_never_worse_than_its_start(seed: int):
    """
    Problems have lost groups, best effort, groups without weight, and unservable groups.
    """
    problem = a_random_problem(seed, num_groups=8, num_instances=3, num_models=3)
    start = a_random_order(problem, seed)

    found = routed(problem, time_limit_s=0.02, start=start)

    assert plan_cost(problem, found).total <= plan_cost(problem, start).total


def test_alternating_deadlines_are_batched_by_model():
    """Four groups of 10 s, swaps of 20 s: EDF swaps three times, which makes two groups late."""
    groups = [Group(model=k % 2, deadline_s=d) for k, d in enumerate((70.0, 75.0, 80.0, 85.0))]
    problem = a_problem(groups, [Instance(active=0, activate_s=(20.0, 20.0))])

    assert plan_cost(problem, edf(problem)).late_share == 0.25
    assert queues_of(routed(problem, time_limit_s=0.05)) == [[0, 2, 1, 3]]


def test_infeasible_groups_come_after_other_groups():
    groups = [Group(deadline_s=-1.0), Group(deadline_s=10.0), Group(deadline_s=20.0)]
    problem = a_problem(groups, [Instance(active=0)])

    assert queues_of(routed(problem, time_limit_s=0.05)) == [[1, 2, 0]]


def test_groups_go_only_to_permitted_instances():
    groups = [Group(deadline_s=10.0), Group(model=1, deadline_s=10.0)]
    instances = [Instance(activate_s=(0.0, inf)), Instance(activate_s=(inf, 0.0))]
    problem = a_problem([*groups, *groups], instances)

    queues = queues_of(routed(problem, time_limit_s=0.05))

    assert [sorted(queue) for queue in queues] == [[0, 2], [1, 3]]


def test_search_improves_on_a_dispatching_rule_for_a_hard_problem():
    problem = instance(1, 20, 2, 3)
    start = edf_batching(problem)

    found = routed(problem, time_limit_s=0.1)

    assert plan_cost(problem, found).late_share < plan_cost(problem, start).late_share


def test_a_problem_without_groups_has_the_empty_plan():
    assert queues_of(routed(a_problem([]), start=an_order([]))) == [[]]
