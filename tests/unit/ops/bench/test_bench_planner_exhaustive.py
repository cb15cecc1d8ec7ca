"""The optimum by enumeration equals the cost of the cheapest plan."""

from itertools import permutations

import pytest

from ops.bench.planner_exhaustive import optimum
from ops.bench.planner_instances import instance
from ops.bench.planner_keeping import total_cost
from solver.planning.orders.rules import edf_batching
from tests.planning_problems import NEVER, Group, Instance, a_problem, an_order


def test_optimum_is_the_least_cost_of_all_plans() -> None:
    groups = [
        Group(model=0, deadline_s=12, work_var=9),
        Group(model=1, deadline_s=25, drain_s=2),
        Group(model=0, deadline_s=21, weight=4),
        Group(model=1, deadline_s=9, weight=2),
    ]
    problem = a_problem(groups, [Instance(active=0), Instance(active=0, available_s=8)])

    every = [
        total_cost(problem, an_order(order[:cut], order[cut:]))
        for order in permutations(range(4))
        for cut in range(5)
    ]

    assert optimum(problem) == pytest.approx(min(every), abs=1e-12)
    assert optimum(problem) < max(every)


def test_optimum_respects_permitted_instances() -> None:
    groups = [Group(model=1, deadline_s=30), Group(model=0, deadline_s=30)]
    only_one = Instance(active=0, activate_s=(0.0, NEVER))
    problem = a_problem(groups, [only_one, Instance(active=1, activate_s=(NEVER, 0.0))])

    assert optimum(problem) == pytest.approx(total_cost(problem, an_order([1], [0])))


def test_a_rule_is_never_better_than_the_optimum() -> None:
    problem = instance(0, 4, 2, 3)

    assert optimum(problem) <= total_cost(problem, edf_batching(problem)) + 1e-12


def test_unsupported_problems_are_rejected() -> None:
    many = a_problem([Group() for _ in range(9)], [Instance(), Instance()])
    lonely = a_problem([Group()], [Instance()])
    nowhere = a_problem([Group(model=1)], [Instance(activate_s=(0.0, NEVER))] * 2)

    for problem in (many, lonely):
        with pytest.raises(ValueError, match="two instances"):
            optimum(problem)
    with pytest.raises(ValueError, match="no instance may serve"):
        optimum(nowhere)
