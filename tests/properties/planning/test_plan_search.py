"""The compiled search against the reference objective, and its invariants."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.planning.generator import generate, kept_order
from solver.planning.problem.objective import homes, plan_cost, servable
from solver.planning.problem.problem import NONE, PlanningProblem, QueueOrder
from solver.planning.search.evaluation import load, total_cost
from solver.planning.search.state import cost_of, empty_state, order_of
from solver.planning.search.tables import tables_of
from tests.planning_problems import (
    Instance,
    a_problem,
    a_random_order,
    a_random_problem,
    an_order,
    queues_of,
    running_as,
)

seeds = st.integers(0, 2**32 - 1)


def problem_of(seed: int) -> PlanningProblem:
    random = np.random.default_rng(seed)
    return a_random_problem(
        seed,
        num_groups=int(random.integers(1, 24)),
        num_instances=int(random.integers(1, 6)),
        num_models=int(random.integers(1, 5)),
    )


def ticking() -> Callable[[], float]:
    """A clock that advances by a millisecond with each reading."""
    ticks = itertools.count()
    return lambda: 0.001 * next(ticks)


def found(problem: PlanningProblem, *, looks: int = 8, seed: int = 3) -> QueueOrder:
    return generate(problem, budget_s=0.001 * looks, clock=ticking(), seed=seed).order


class TestCosts:
    @given(seeds)
    def test_kernel_costs_equal_the_reference_costs(self, seed: int):
        problem = problem_of(seed)
        order = a_random_order(problem, seed)
        tables, state = tables_of(problem), empty_state(problem)
        load(tables, state, order.groups.astype(np.int64), order.starts.astype(np.int64))
        reference = plan_cost(problem, order)

        assert cost_of(problem, tables, state).total == pytest.approx(reference.total, rel=1e-6)
        assert queues_of(order_of(state)) == queues_of(order)

    @given(seeds, seeds)
    def test_kernels_and_reference_agree_on_the_cheaper_plan(self, seed: int, other: int):
        problem = problem_of(seed)
        tables = tables_of(problem)
        costs = []
        for order in (a_random_order(problem, seed), a_random_order(problem, other)):
            state = empty_state(problem)
            load(tables, state, order.groups.astype(np.int64), order.starts.astype(np.int64))
            costs.append((total_cost(tables, state), plan_cost(problem, order).total))
        (first, first_reference), (second, second_reference) = costs

        assert first - second == pytest.approx(first_reference - second_reference, abs=1e-6)


class TestPlans:
    @given(seeds)
    def test_every_servable_group_has_one_position(self, seed: int):
        problem = problem_of(seed)
        for order in (kept_order(problem), found(problem)):
            plan_cost(problem, order)  # rejects invalid plans

            assert sorted(order.groups.tolist()) == np.flatnonzero(servable(problem)).tolist()

    @given(seeds)
    def test_the_kept_plan_does_not_move_or_reorder_groups(self, seed: int):
        problem = problem_of(seed)
        home = homes(problem)
        for instance, queue in enumerate(queues_of(kept_order(problem))):
            old = [group for group in queue if home[group] != NONE]

            assert all(home[group] == instance for group in old)
            assert old == sorted(old, key=lambda group: int(problem.running.position[group]))

    @settings(max_examples=50)
    @given(seeds)
    def test_a_generated_plan_is_never_worse_than_the_kept_plan(self, seed: int):
        problem = problem_of(seed)
        generated = generate(problem, budget_s=0.008, clock=ticking(), seed=seed)
        kept = plan_cost(problem, kept_order(problem)).total

        assert generated.kept_cost.total == pytest.approx(kept, rel=1e-6, abs=1e-9)
        assert plan_cost(problem, generated.order).total <= kept + 1e-9
        assert generated.cost.total == pytest.approx(
            plan_cost(problem, generated.order).total, rel=1e-6, abs=1e-9
        )

    @given(seeds)
    def test_equal_seeds_and_moves_give_equal_plans(self, seed: int):
        problem = problem_of(seed)

        assert queues_of(found(problem)) == queues_of(found(problem))

    def test_without_a_time_budget_the_plan_is_kept(self):
        problem = problem_of(7)
        generated = generate(problem, budget_s=0.0, clock=ticking(), seed=1)

        assert generated.num_moves == 0
        assert queues_of(generated.order) == queues_of(kept_order(problem))

    def test_a_problem_without_groups_has_a_plan(self):
        problem = a_problem([], [Instance(), Instance()])

        assert queues_of(found(problem)) == [[], []]


class TestQuality:
    def test_small_problems_are_solved_to_the_optimum(self):
        """The search finds an optimal plan for at least 19 of 20 problems with five groups."""
        optimal = 0
        for seed in range(20):
            problem = a_random_problem(seed, num_groups=5, num_instances=2, num_models=2)
            problem = replace(problem, running=running_as(an_order([], []), 5))
            best = min(plan_cost(problem, order).total for order in all_plans(problem))
            mine = plan_cost(problem, found(problem, looks=30)).total
            optimal += mine <= best + 1e-9

        assert optimal >= 19

    @pytest.mark.parametrize("seed", range(5))
    def test_a_good_plan_in_force_hardly_changes(self, seed: int):
        """Moving groups of an optimised plan usually gains less than the price of a move."""
        problem = a_random_problem(seed, num_groups=20, num_instances=4, num_models=3)
        searched = found(problem, looks=60)
        again = replace(problem, running=running_as(searched, 20))
        moved = homes(again) != instance_of(again, found(again, looks=60, seed=9))

        assert np.count_nonzero(moved & (homes(again) != NONE)) <= 3


def instance_of(problem: PlanningProblem, order: QueueOrder) -> np.ndarray:
    instance = np.full(problem.num_groups, NONE)
    for index, queue in enumerate(queues_of(order)):
        instance[queue] = index
    return instance


def all_plans(problem: PlanningProblem) -> list[QueueOrder]:
    """Every plan for two instances: each order of each permitted split."""
    plans = []
    groups = [int(group) for group in np.flatnonzero(servable(problem))]
    for permutation in itertools.permutations(groups):
        for cut in range(len(permutation) + 1):
            queues = (permutation[:cut], permutation[cut:])
            if all(problem.may_serve(g, group) for g in (0, 1) for group in queues[g]):
                plans.append(an_order(*queues))
    return plans
