"""Whatever the problem, every baseline plans all that can be served, where it can be served."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.planning.objective import plan_cost, servable
from solver.planning.order_baselines.atcs import atcs, best_atcs
from solver.planning.order_baselines.edf import edf, edf_batching
from solver.planning.order_baselines.fcfs import fcfs
from solver.planning.order_baselines.queues import OrderPolicy
from solver.planning.order_baselines.shepherd import shepherd
from solver.planning.order_baselines.shepherd_partition import demand_of, partition, proportional
from solver.planning.order_baselines.spreading import by_chance, round_robin
from solver.planning.problem import PlanningProblem, QueueOrder
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
def test_every_group_that_someone_may_serve_is_planned_once(
    policy: OrderPolicy, problem: PlanningProblem
) -> None:
    planned = np.sort(policy(problem).groups)

    assert planned.tolist() == np.flatnonzero(servable(problem)).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@given(problem=problems)
@settings(max_examples=40, deadline=None)
def test_no_instance_gets_what_it_may_not_serve(
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
def test_every_model_that_is_wanted_has_a_host_that_may_have_it(
    partitioned: Callable[[PlanningProblem], np.ndarray], problem: PlanningProblem
) -> None:
    hosts = partitioned(problem)

    wanted = demand_of(problem) > 0
    assert not (hosts & ~wanted).any()
    assert hosts[:, wanted.any(axis=0)].any(axis=0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_serve_gives_empty_queues(policy: OrderPolicy) -> None:
    order = policy(a_problem([], [Instance(), Instance()]))

    assert (order.groups.tolist(), order.starts.tolist()) == ([], [0, 0, 0])
