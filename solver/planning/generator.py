"""The plan generator: improves the plan in force within a time budget (QLM §7)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from solver.planning.problem.objective import homes, running_order
from solver.planning.problem.problem import NONE, PlanCost, PlanningProblem, QueueOrder
from solver.planning.search.annealing import Annealer
from solver.planning.search.dispatch import LOOKAHEADS, dispatch
from solver.planning.search.evaluation import load
from solver.planning.search.insertion import insert
from solver.planning.search.state import State, cost_of, empty_state, order_of
from solver.planning.search.tables import Tables, tables_of
from solver.planning.search.trials import Search

_MOST_INSERTED = 64
"""
Maximum number of new groups for which all positions are searched. With more new groups, each new
group goes to the end of a queue, by the rule of `dispatch`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedPlan:
    """Result of one search of the plan generator."""

    order: QueueOrder
    cost: PlanCost
    kept_cost: PlanCost
    """Cost of the plan in force with new groups inserted."""
    num_moves: int
    """Number of changes of the plan that were tried."""


def kept_order(problem: PlanningProblem) -> QueueOrder:
    """
    The plan in force, with each new group inserted at its cheapest position.

    A group counts as new if its instance has left or may no longer serve the group.
    """
    _, state = _kept(problem)
    return order_of(state)


def generate(
    problem: PlanningProblem, *, budget_s: Seconds, clock: Callable[[], Seconds], seed: int
) -> GeneratedPlan:
    """
    The best plan found within *budget_s*; never worse than keeping the plan in force.

    Args:
        budget_s: Search time by *clock*, from the call on. The first plan is made even if it takes
            longer.
        clock: CPU or wall time; only differences count.
        seed: Seed of the search; equal seeds with equal numbers of moves give equal plans.

    Source: QLM §7, which gives its program to a solver.
    Differs: the plan in force is improved by annealing on the true objective. The best plan so far
    is kept, so that there is a plan at any time and in any overload.
    """
    begun_at = clock()
    tables, state = _kept(problem)
    kept, kept_cost = order_of(state), cost_of(problem, tables, state)
    if len(tables.served) == 0 or budget_s <= 0:
        return GeneratedPlan(order=kept, cost=kept_cost, kept_cost=kept_cost, num_moves=0)
    annealer = Annealer(tables, state, seed=seed)
    search = Search(annealer, problem.num_groups, lambda: (clock() - begun_at) / budget_s)
    if _is_warm(problem):
        search.from_plan()
    else:
        search.everywhere(kept)
    order, cost = kept, kept_cost
    if annealer.best_cost < kept_cost.total:
        order = annealer.best()
        cost = cost_of(problem, tables, _loaded(problem, tables, order))
    return GeneratedPlan(order=order, cost=cost, kept_cost=kept_cost, num_moves=search.num_moves)


def _kept(problem: PlanningProblem) -> tuple[Tables, State]:
    tables = tables_of(problem)
    state = _loaded(problem, tables, running_order(problem))
    new = tables.served[homes(problem)[tables.served] == NONE]
    by_deadline = np.argsort(problem.groups.deadline_s[new], kind="stable")
    if len(new) > _MOST_INSERTED:
        dispatch(tables, state, new, *LOOKAHEADS[0])
    else:
        insert(tables, state, new[by_deadline])
    return tables, state


def _loaded(problem: PlanningProblem, tables: Tables, order: QueueOrder) -> State:
    state = empty_state(problem)
    load(tables, state, order.groups.astype(np.int64), order.starts.astype(np.int64))
    return state


def _is_warm(problem: PlanningProblem) -> bool:
    return bool((homes(problem) != NONE).any())
