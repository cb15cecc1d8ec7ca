"""The exact program: proved optima equal enumerated optima, and the true cost decides."""

from collections.abc import Iterator
from itertools import pairwise, permutations
from math import inf

import numpy as np
import pytest

from ops.baselines.planning.exact import exact
from ops.baselines.planning.succession import certain, setup_s, swap_costs_of
from ops.baselines.planning.vehicle_routing import best_of
from ops.bench.planner_instances import instance
from solver.planning.orders.rules import edf_batching
from solver.planning.problem.objective import plan_cost, servable
from solver.planning.problem.problem import Objective, PlanningProblem, QueueOrder
from tests.planning_problems import (
    Group,
    Instance,
    a_problem,
    a_random_problem,
    an_order,
    queues_of,
)


def all_plans(problem: PlanningProblem) -> Iterator[QueueOrder]:
    """All plans of a problem with two instances."""
    served = np.flatnonzero(servable(problem)).tolist()
    for ranking in permutations(served):
        for cut in range(len(ranking) + 1):
            queues = (ranking[:cut], ranking[cut:])
            if all(problem.may_serve(g, i) for g, queue in enumerate(queues) for i in queue):
                yield an_order(*queues)


@pytest.mark.parametrize("seed", range(12))
def test_proved_cost_is_the_least_of_all_plans_at_mean_times(seed: int):
    problem = a_random_problem(seed, num_groups=4, num_instances=2, num_models=3)
    at_mean = certain(problem)

    found = exact(problem)

    least = min(plan_cost(at_mean, order).total for order in all_plans(problem))
    assert found.proved
    assert plan_cost(at_mean, found.order).total == pytest.approx(least, abs=1e-5)


def test_alternating_deadlines_are_batched_by_model():
    """Four groups of 10 s, swaps of 20 s: EDF swaps three times, which makes two groups late."""
    groups = [Group(model=k % 2, deadline_s=d) for k, d in enumerate((70.0, 75.0, 80.0, 85.0))]
    problem = a_problem(groups, [Instance(active=0, activate_s=(20.0, 20.0))])

    found = exact(problem)

    assert found.proved
    assert queues_of(found.order) == [[0, 2, 1, 3]]
    assert plan_cost(problem, found.order).late_share == 0.0


def test_groups_move_only_if_the_gain_exceeds_the_price():
    groups = [Group(deadline_s=10.0), Group(deadline_s=10.0), Group()]
    instances = [Instance(active=0), Instance(active=0)]
    problem = a_problem(groups, instances, running=[(0, 0), (0, 1), (0, 2)])

    queues = queues_of(exact(problem).order)

    assert [len(set(queue) & {0, 1}) for queue in queues] == [1, 1]


def test_equal_problems_have_equal_plans_if_the_search_is_cut():
    problem = instance(1, 15, 2, 3)

    one, two = (exact(problem, work_limit=0.05) for _ in range(2))

    assert not one.proved
    assert queues_of(one.order) == queues_of(two.order)


def test_without_time_the_start_plan_is_returned():
    problem = instance(1, 15, 2, 3)
    able = [i for i in range(15) if problem.may_serve(0, i)]
    start = an_order(able, [i for i in range(15) if i not in able])

    found = exact(problem, time_limit_s=0.0, start=start)

    assert not found.proved
    assert queues_of(found.order) == queues_of(start)
    assert queues_of(exact(problem, time_limit_s=0.0).order) == queues_of(edf_batching(problem))


def test_groups_without_a_permitted_instance_are_in_no_queue():
    problem = a_problem([Group(), Group(model=1)], [Instance(activate_s=(5.0, inf))])

    assert queues_of(exact(problem).order) == [[0]]


def test_a_problem_without_groups_has_the_empty_plan():
    assert queues_of(exact(a_problem([], [Instance(), Instance()])).order) == [[], []]


def test_the_optimum_at_mean_times_can_cost_more_than_its_start():
    """
    On average, group 1 is in time in both positions. After group 0, it is only 1 s early with a
    standard deviation of 10 s, so that it is often late; at the head it is never late. By mean
    times, the plans differ only in the wait of best effort, which prefers group 0 first.
    """
    groups = [Group(work_s=9.0, work_var=100.0, weight=5.0), Group(work_s=10.0, deadline_s=20.0)]
    objective = Objective(milestones=(1.0,), tardiness=0.0)
    problem = a_problem(groups, [Instance(active=0)], objective=objective)
    start = an_order([1, 0])

    found = exact(problem, start=start)

    assert found.proved
    assert queues_of(found.order) == [[0, 1]]
    assert best_of(problem, [start, found.order]) is start
    assert best_of(certain(problem), [start, found.order]) is found.order


def test_the_first_of_equal_plans_is_kept():
    problem = a_problem([Group(), Group()], [Instance(active=0)])
    orders = [an_order([0, 1]), an_order([1, 0])]

    assert best_of(problem, orders) is orders[0]
    with pytest.raises(ValueError, match="empty"):
        best_of(problem, [])


@pytest.mark.parametrize("seed", range(4))
def test_swap_costs_match_those_of_the_plan(seed: int):
    problem = a_random_problem(seed, num_groups=6, num_instances=2, num_models=2)
    order = edf_batching(problem)

    spent, tables = 0.0, swap_costs_of(problem)
    for g, queue in enumerate(queues_of(order)):
        table = tables[g]
        spent += sum(table[a, b] for a, b in pairwise([problem.num_groups, *queue]))

    assert spent > 0
    assert plan_cost(problem, order).drain == pytest.approx(spent)


def test_setup_times_are_infinite_where_an_instance_may_not_serve():
    problem = a_problem([Group(), Group(model=1)], [Instance(active=0, activate_s=(5.0, inf))])

    assert setup_s(problem, 0).tolist() == [[0.0, inf], [5.0, inf], [0.0, inf]]
