"""Every baseline assigns each servable group to an instance that may serve the group."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.baselines.planning.atcs import atcs, best_atcs
from ops.baselines.planning.shepherd import shepherd
from ops.baselines.planning.shepherd_partition import demand_of, partition, proportional
from ops.baselines.planning.spreading import by_chance, round_robin
from solver.planning.orders.queues import OrderPolicy
from solver.planning.orders.rules import edf, edf_batching, fcfs
from solver.planning.problem.objective import plan_cost, servable
from solver.planning.problem.problem import PlanningProblem, QueueOrder
from tests.planning_problems import Instance, a_problem, a_random_problem


def cheapest_atcs(problem: PlanningProblem) -> QueueOrder:
    return best_atcs(problem, lambda problem, order: plan_cost(problem, order).total)


def thrown(problem: PlanningProblem) -> QueueOrder:
    return by_chance(problem, np.random.default_rng(7))


POLICIES: tuple[OrderPolicy, ...] = (
    fcfs,
    edf,
    edf_batching,
    atcs,
    cheapest_atcs,
    shepherd,
    round_robin,
    thrown,
)

problems = st.builds(
    a_random_problem,
    st.integers(0, 10**6),
    num_groups=st.integers(1, 14),
    num_instances=st.integers(1, 4),
    num_models=st.integers(1, 4),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(problem=problems)
@settings(max_examples=40, deadline=None)
def test_every_servable_group_is_planned_once(
    policy: OrderPolicy, problem: PlanningProblem
) -> None:
    planned = np.sort(policy(problem).groups)

    assert planned.tolist() == np.flatnonzero(servable(problem)).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@given(problem=problems)
@settings(max_examples=40, deadline=None)
def test_no_instance_gets_a_group_it_may_not_serve(
    policy: OrderPolicy, problem: PlanningProblem
) -> None:
    order = policy(problem)

    assert len(order.starts) == problem.num_instances + 1
    for instance in range(problem.num_instances):
        assert all(problem.may_serve(instance, int(i)) for i in order.queue(instance))


@pytest.mark.parametrize("policy", POLICIES)
@given(problem=problems)
@settings(max_examples=20, deadline=None)
def test_equal_problems_have_equal_plans(policy: OrderPolicy, problem: PlanningProblem) -> None:
    first, again = policy(problem), policy(problem)

    assert first.groups.tolist() == again.groups.tolist()
    assert first.starts.tolist() == again.starts.tolist()


@pytest.mark.parametrize("partitioned", [partition, proportional])
@given(problem=problems)
@settings(max_examples=40, deadline=None)
def test_every_requested_model_has_a_permitted_host(
    partitioned: Callable[[PlanningProblem], np.ndarray], problem: PlanningProblem
) -> None:
    hosts = partitioned(problem)

    wanted = demand_of(problem) > 0
    assert not (hosts & ~wanted).any()
    assert hosts[:, wanted.any(axis=0)].any(axis=0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_problem_without_groups_gives_empty_queues(policy: OrderPolicy) -> None:
    order = policy(a_problem([], [Instance(), Instance()]))

    assert (order.groups.tolist(), order.starts.tolist()) == ([], [0, 0, 0])
