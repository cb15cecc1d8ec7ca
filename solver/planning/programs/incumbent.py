"""Plans of programs are judged by the true objective, beside the plan that was there."""

from collections.abc import Iterable

from solver.planning.objective import plan_cost
from solver.planning.problem import PlanningProblem, QueueOrder


def best_of(problem: PlanningProblem, orders: Iterable[QueueOrder]) -> QueueOrder:
    """
    The one of *orders* that costs least, by `plan_cost`; the first one of several.

    A program solves a surrogate, whose optimum may cost more than the plan that it started from.

    Raises:
        ValueError: There is no plan, or one is not a plan for *problem*.
    """
    return min(orders, key=lambda order: plan_cost(problem, order).total)
