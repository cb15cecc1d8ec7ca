"""Use of the time budget: trials if it allows several, and the best plan is never lost."""

from itertools import count

import numpy as np
import pytest

from ops.bench.planner_instances import instance
from solver.planning.generator import kept_order
from solver.planning.problem.objective import plan_cost
from solver.planning.problem.problem import PlanningProblem, QueueOrder
from solver.planning.search.annealing import Annealer
from solver.planning.search.evaluation import load
from solver.planning.search.state import empty_state
from solver.planning.search.tables import tables_of
from solver.planning.search.trials import MOVES_AT_ONCE, Search


class Watched(Annealer):
    """A fake search that records its calls."""

    def __init__(self, problem: PlanningProblem, start: QueueOrder) -> None:
        tables, state = tables_of(problem), empty_state(problem)
        load(tables, state, start.groups.astype(np.int64), start.starts.astype(np.int64))
        super().__init__(tables, state, seed=0)
        self.temperatures: list[float] = []
        self.restarts: list[int] = []
        """Number of runs before each restart."""

    def run(self, num_moves: int, *, hot: float, cold: float) -> None:
        super().run(num_moves, hot=hot, cold=cold)
        self.temperatures.append(hot)

    def restart(self, order: QueueOrder) -> None:
        super().restart(order)
        self.restarts.append(len(self.temperatures))


def searched(num_groups: int, looks: int) -> tuple[Watched, Search, PlanningProblem]:
    """Search for a new plan within *looks* readings of the clock."""
    problem = instance(0, num_groups, 3, 3)
    start = kept_order(problem)
    annealer = Watched(problem, start)
    ticks = count()
    search = Search(annealer, problem.num_groups, lambda: next(ticks) / looks)
    search.everywhere(start)
    return annealer, search, problem


def test_a_small_problem_gets_four_trials_and_a_final_phase() -> None:
    annealer, _, _ = searched(10, 1000)

    assert len(annealer.restarts) == 4
    assert np.diff([0, *annealer.restarts]) == pytest.approx(150, abs=25)
    for restart in annealer.restarts[:-1]:
        assert annealer.temperatures[restart - 1] < 0.2 * annealer.temperatures[restart]
    last = annealer.temperatures[annealer.restarts[-1] :]
    assert last == sorted(last, reverse=True)
    assert last[0] < 0.3 * annealer.temperatures[0]


def test_a_large_problem_gets_a_single_search() -> None:
    annealer, _, _ = searched(200, 40)

    assert annealer.restarts == []
    assert annealer.temperatures == sorted(annealer.temperatures, reverse=True)


def test_moves_are_counted_and_end_with_the_budget() -> None:
    annealer, search, _ = searched(10, 100)

    assert search.num_moves == MOVES_AT_ONCE * len(annealer.temperatures)
    assert 80 <= len(annealer.temperatures) <= 100


def test_without_a_budget_no_move_is_tried() -> None:
    problem = instance(0, 10, 3, 3)
    start = kept_order(problem)
    annealer = Watched(problem, start)
    search = Search(annealer, 10, lambda: 1.0)
    search.everywhere(start)
    search.from_plan()

    assert search.num_moves == 0
    assert annealer.temperatures == []


def test_a_plan_in_force_is_searched_locally() -> None:
    problem = instance(0, 10, 3, 3)
    annealer = Watched(problem, kept_order(problem))
    ticks = count()
    Search(annealer, 10, lambda: next(ticks) / 20).from_plan()
    everywhere, _, _ = searched(10, 20)

    assert annealer.restarts == []
    assert max(annealer.temperatures) < 0.1 * max(everywhere.temperatures)


def test_a_restart_keeps_the_best_plan_and_its_cost() -> None:
    problem = instance(0, 40, 3, 3)
    start = kept_order(problem)
    annealer = Watched(problem, start)
    annealer.run(5000, hot=1e-4, cold=1e-5)
    best, cost = annealer.best(), annealer.best_cost
    annealer.restart(start)

    assert cost < plan_cost(problem, start).total
    assert annealer.best_cost == cost
    assert annealer.best().groups.tolist() == best.groups.tolist()
    annealer.run(5000, hot=1e-4, cold=1e-5)
    found = plan_cost(problem, annealer.best()).total
    assert found == pytest.approx(annealer.best_cost, abs=1e-9)
    assert found <= cost + 1e-12
