"""Differences between the rules FCFS, EDF, batching, ATCS, round robin and random."""

import numpy as np
import pytest

from ops.baselines.planning.atcs import atcs, best_atcs
from ops.baselines.planning.spreading import by_chance, round_robin
from ops.sim.plans import judge
from solver.planning.orders.rules import edf, edf_batching, fcfs
from solver.planning.problem.problem import PlanningProblem, QueueOrder
from tests.planning_problems import NEVER, Group, Instance, a_problem, queues_of

BUSY = Instance(active=0)


def alternating(*, deadlines: list[float]) -> PlanningProblem:
    """Groups of models 0 and 1 in turn, on one instance with model 0 active."""
    groups = [Group(model=n % 2, deadline_s=at) for n, at in enumerate(deadlines)]
    return a_problem(groups, [BUSY])


def test_fcfs_orders_by_age_and_edf_by_deadline() -> None:
    # The groups have waited for 10 s and 40 s; the first group has the earlier deadline.
    groups = [Group(deadline_s=20, slo_s=30), Group(deadline_s=60, slo_s=100)]
    problem = a_problem(groups, [BUSY])

    assert queues_of(fcfs(problem)) == [[1, 0]]
    assert queues_of(edf(problem)) == [[0, 1]]


@pytest.mark.parametrize("policy", [fcfs, edf, edf_batching, atcs])
def test_best_effort_comes_after_work_with_a_deadline(policy) -> None:
    problem = a_problem([Group(deadline_s=NEVER, slo_s=NEVER), Group(deadline_s=90)], [BUSY])

    assert queues_of(policy(problem)) == [[1, 0]]


@pytest.mark.parametrize("policy", [fcfs, edf])
def test_work_goes_to_the_instance_that_would_finish_it_first(policy) -> None:
    groups = [Group(deadline_s=at, slo_s=100) for at in (10, 20, 30)]
    problem = a_problem(groups, [BUSY, Instance(active=0, available_s=15)])

    assert queues_of(policy(problem)) == [[0, 1], [2]]


def test_edf_ignores_swap_times_when_choosing_an_instance() -> None:
    groups = [Group(model=1, deadline_s=1), Group(model=0, deadline_s=2), Group(deadline_s=3)]
    ready = [BUSY, Instance(active=1, available_s=1)]

    # EDF places the first group on the free instance although the other instance has its model; the
    # swap of 5 s only affects the instance of the last group.
    assert queues_of(edf(a_problem(groups, ready))) == [[0, 2], [1]]
    assert queues_of(edf_batching(a_problem(groups, ready))) == [[1, 2], [0]]


def test_batching_swaps_once_where_edf_swaps_every_time() -> None:
    problem = alternating(deadlines=[10, 20, 30, 40, 50, 60])

    assert judge(problem, edf(problem)).swaps == 5
    assert judge(problem, edf_batching(problem)).swaps == 1
    assert queues_of(edf_batching(problem)) == [[0, 2, 4, 1, 3, 5]]


def test_batching_continues_with_the_most_urgent_model() -> None:
    groups = [Group(model=2, deadline_s=50), Group(model=1, deadline_s=40), Group(deadline_s=90)]
    problem = a_problem(groups, [Instance(active=0, activate_s=(5.0, 5.0, 5.0))])

    assert queues_of(edf_batching(problem)) == [[2, 1, 0]]


def test_atcs_weighs_urgency_against_the_swap() -> None:
    def first(other_deadline_s: float) -> int:
        problem = a_problem(
            [Group(model=0, deadline_s=60), Group(model=1, deadline_s=other_deadline_s)], [BUSY]
        )
        return queues_of(atcs(problem))[0][0]

    assert first(15) == 1
    assert first(59) == 0


def test_atcs_prefers_high_weight_and_little_work() -> None:
    groups = [
        Group(weight=1, deadline_s=0),
        Group(weight=9, deadline_s=0),
        Group(weight=9, work_s=1, deadline_s=0),
    ]

    assert queues_of(atcs(a_problem(groups, [BUSY]))) == [[2, 1, 0]]


def test_best_atcs_returns_the_cheapest_of_nine_plans() -> None:
    problem = alternating(deadlines=[15, 21, 32, 40, 55, 61])

    def swaps(problem: PlanningProblem, order: QueueOrder) -> float:
        return judge(problem, order, num_scenarios=1).swaps

    def no_swaps(problem: PlanningProblem, order: QueueOrder) -> float:
        return -swaps(problem, order)

    assert swaps(problem, best_atcs(problem, swaps)) == 1
    assert swaps(problem, best_atcs(problem, no_swaps)) > 1


def test_round_robin_balances_groups_not_time() -> None:
    groups = [Group(deadline_s=10 * n, slo_s=100) for n in range(6)]
    slow = [BUSY, Instance(active=0, available_s=1000)]

    assert queues_of(round_robin(a_problem(groups, slow))) == [[0, 2, 4], [1, 3, 5]]
    assert queues_of(edf(a_problem(groups, slow))) == [[0, 1, 2, 3, 4, 5], []]


def test_round_robin_skips_instances_that_may_not_serve() -> None:
    groups = [Group(model=1), Group(model=1), Group(model=0)]
    instances = [Instance(activate_s=(0.0, NEVER)), BUSY, BUSY]

    assert queues_of(round_robin(a_problem(groups, instances))) == [[2], [0], [1]]


def test_spreading_batches_models_inside_a_queue() -> None:
    problem = alternating(deadlines=[30, 10, 40, 20])

    assert queues_of(round_robin(problem)) == [[1, 3, 0, 2]]


def test_random_order_depends_only_on_the_generator() -> None:
    problem = a_problem([Group(deadline_s=n) for n in range(20)], [BUSY, BUSY, BUSY])

    first, again, other = (
        queues_of(by_chance(problem, np.random.default_rng(seed))) for seed in (1, 1, 2)
    )
    assert first == again != other
