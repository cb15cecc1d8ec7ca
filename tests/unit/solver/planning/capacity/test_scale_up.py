"""Scale-up: the bound equals hand-computed values, no plan beats it, and planning confirms it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from solver.planning.capacity.fluid import SpareInstance, least_added
from solver.planning.capacity.scale_up import ScaleUpAdvice, scale_up, with_added
from solver.planning.orders.rules import edf_batching
from solver.planning.problem.objective import plan_cost
from solver.planning.problem.problem import NONE, PlanningProblem
from tests.planning_problems import Group, Instance, a_problem, a_random_problem, queues_of


def a_spare(*, activate_s: Sequence[float] = (0.0, 0.0), available_s: float = 0.0) -> SpareInstance:
    return SpareInstance(device=0, activate_s=np.array(activate_s), available_s=available_s)


def overloaded(load: float, num_instances: int) -> PlanningProblem:
    """Groups of 10 s that are all due in 100 s."""
    groups = [Group(deadline_s=100.0)] * round(load * num_instances * 10)
    return a_problem(groups, [Instance(active=0)] * num_instances)


@pytest.mark.parametrize(
    ("spare", "needed"),
    [
        pytest.param(a_spare(), 3, id="three tenths more"),
        pytest.param(a_spare(activate_s=(20.0, 0.0)), 4, id="80 s of each are left"),
        pytest.param(a_spare(activate_s=(20.0, 0.0), available_s=40.0), 8, id="40 s are left"),
        pytest.param(a_spare(available_s=100.0), None, id="comes too late"),
        pytest.param(a_spare(activate_s=(inf, 0.0)), None, id="may not have the model"),
    ],
)
def test_a_load_of_1_3_needs_three_tenths_more_instances(spare: SpareInstance, needed: int | None):
    """Ten instances have 1000 s in total until the deadline; the work takes 1300 s."""
    assert least_added(overloaded(1.3, 10), spare, tolerance=0.0) == needed


@pytest.mark.parametrize(("num_instances", "needed"), [(1, 1), (2, 1), (4, 2), (20, 6)])
def test_the_bound_grows_with_the_cluster(num_instances: int, needed: int):
    assert least_added(overloaded(1.3, num_instances), a_spare(), tolerance=0.0) == needed


def test_a_feasible_load_needs_no_instance():
    assert least_added(overloaded(1.0, 10), a_spare(), tolerance=0.0) == 0
    assert least_added(a_problem([]), a_spare(), tolerance=0.0) == 0


def test_some_work_may_be_late():
    """130 s of 1300 s of work may be late; 1170 s must be in time."""
    assert least_added(overloaded(1.3, 10), a_spare(), tolerance=0.1) == 2


def test_a_swap_takes_the_time_of_its_instance():
    """
    Two models with 45 s of work each, due in 100 s. A swap takes A s for a share of 45/(100 - A)
    of the instance: 45 + 45 + 4.5 s are in time, 45 + 45 + 11.25 s are late.
    """
    groups = [Group(model=m, work_s=45.0, deadline_s=100.0) for m in range(2)]

    def needed(activate_s: float) -> int | None:
        only = Instance(active=0, activate_s=(activate_s, activate_s))
        return least_added(a_problem(groups, [only]), a_spare(), tolerance=0.0)

    assert needed(9.0) == 0
    assert needed(20.0) == 1


def test_an_early_deadline_needs_more_instances_than_a_late_deadline():
    """60 s of work are due in 20 s, all other work in an hour."""
    groups = [Group(work_s=10.0, deadline_s=20.0)] * 6 + [Group(work_s=10.0, deadline_s=3600.0)] * 9
    problem = a_problem(groups, [Instance(active=0)])

    assert least_added(problem, a_spare(), tolerance=0.0) == 2


def test_infeasible_work_and_best_effort_need_no_instance():
    """More instances do not help work whose deadline has passed."""
    groups = [Group(deadline_s=-1.0), Group(deadline_s=inf, slo_s=inf, work_s=1e4)]
    problem = a_problem(groups, [Instance(active=0)])

    assert least_added(problem, a_spare(), tolerance=0.0) == 0


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    factor=st.floats(1.0, 4.0),
    tolerance=st.sampled_from([0.0, 0.01, 0.2]),
)
def test_more_work_never_needs_fewer_instances(seed: int, factor: float, tolerance: float):
    problem = a_random_problem(seed, num_groups=12, num_instances=3, num_models=2)
    groups = problem.groups
    heavier = replace(problem, groups=replace(groups, work_s=factor * groups.work_s))

    less, more = (
        least_added(each, a_spare(available_s=1.0), tolerance=tolerance)
        for each in (problem, heavier)
    )

    assert (inf if less is None else less) <= (inf if more is None else more)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
@example(seed=10473)
def test_the_bound_is_zero_where_some_plan_is_never_late(seed: int):
    """
    Deadlines are the completion times of a plan, so the bound must not ask for more instances.

    In the example, an instance swaps its model after a group that drains faster than the work that
    runs there now.
    """
    problem = a_random_problem(seed, num_groups=10, num_instances=3, num_models=2)
    order = edf_batching(problem)
    due_s = np.full(problem.num_groups, inf)
    for g, queue in enumerate(queues_of(order)):
        device = problem.instances.device[g]
        free_s, before = problem.instances.available_s[g], problem.instances.active[g]
        drain_s = problem.instances.drain_s[g]
        for i in queue:
            model = problem.groups.model[i]
            free_s += 0.0 if model == before else drain_s + problem.instances.activate_s[g, model]
            free_s += problem.groups.work_s[device, i]
            due_s[i] = free_s + problem.groups.tail_s[device, i]
            before, drain_s = model, problem.groups.drain_s[device, i]
    in_time = replace(
        problem,
        groups=replace(problem.groups, deadline_s=due_s, spread_s=np.zeros(problem.num_groups)),
    )

    assert least_added(in_time, a_spare(available_s=1e6), tolerance=0.0) == 0


def test_the_first_number_whose_plan_meets_the_target_is_confirmed():
    """A new instance serves 8 groups in time, since its activation takes 20 s."""
    advice = scale_up(
        overloaded(1.3, 10), a_spare(activate_s=(20.0, 0.0)), edf_batching, target=0.999, most=9
    )

    assert advice == ScaleUpAdvice(bound=4, confirmed=4, attainment=1.0)


def test_planning_continues_above_an_insufficient_bound():
    """Each group of 60 s needs its own instance; the bound assumes that groups can be split."""
    groups = [Group(work_s=60.0, deadline_s=100.0)] * 4
    problem = a_problem(groups, [Instance(active=0)])
    tried: list[int] = []

    def plan(larger: PlanningProblem):
        tried.append(larger.num_instances - 1)
        return edf_batching(larger)

    advice = scale_up(problem, a_spare(), plan, target=0.999, most=5)

    assert tried == [2, 3]
    assert advice == ScaleUpAdvice(bound=2, confirmed=3, attainment=1.0)


def test_no_number_above_the_maximum_is_confirmed():
    advice = scale_up(overloaded(1.3, 10), a_spare(), edf_batching, target=0.999, most=2)

    assert advice == ScaleUpAdvice(bound=3, confirmed=None, attainment=None)


def test_no_number_is_tried_if_none_is_enough():
    planned: Callable[..., None] = pytest.fail

    advice = scale_up(overloaded(1.3, 10), a_spare(available_s=1e9), planned, target=0.999, most=2)

    assert advice == ScaleUpAdvice(bound=None, confirmed=None, attainment=None)


def test_added_instances_are_last_and_have_no_model():
    problem = a_problem([Group(deadline_s=10.0), Group(deadline_s=18.0)], [Instance(active=0)])

    larger = with_added(problem, a_spare(activate_s=(4.0, inf), available_s=3.0), 2)

    assert larger.instances.active.tolist() == [0, NONE, NONE]
    assert larger.instances.available_s.tolist() == [0.0, 3.0, 3.0]
    assert larger.may_serve(1, 0)
    assert plan_cost(larger, edf_batching(larger)).late_share == 0.0
    assert problem.num_instances == 1
