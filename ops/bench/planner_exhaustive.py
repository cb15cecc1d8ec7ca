"""The cheapest of all plans for a handful of groups, by exhaustive search."""

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np

from ops.bench.planner_keeping import total_cost
from solver.planning.orders.queues import order_of
from solver.planning.problem.problem import PlanningProblem

MOST_GROUPS = 8


def optimum(problem: PlanningProblem) -> float:
    """
    Least total cost of any plan for two instances.

    A plan's cost is a sum over its queues. So for each partition of the groups, the two queues can
    be ordered independently.

    Raises:
        ValueError: There are not exactly two instances, there are more than `MOST_GROUPS` groups,
            or no instance may serve some of the groups.
    """
    if problem.num_instances != 2 or problem.num_groups > MOST_GROUPS:
        raise ValueError(
            f"an exhaustive search needs two instances and at most {MOST_GROUPS} groups"
        )
    able = [_able(problem, index) for index in (0, 1)]
    everything = frozenset(range(problem.num_groups))
    if able[0] | able[1] != everything:
        raise ValueError("no instance may serve some of the groups")
    return min(
        _cheapest(problem, sorted(first), sorted(everything - first))
        for size in range(problem.num_groups + 1)
        for first in map(frozenset, combinations(sorted(able[0]), size))
        if everything - first <= able[1]
    )


def _able(problem: PlanningProblem, index: int) -> frozenset[int]:
    fits = np.isfinite(problem.instances.activate_s[index, problem.groups.model])
    return frozenset(np.flatnonzero(fits).tolist())


def _cheapest(problem: PlanningProblem, first: Sequence[int], second: Sequence[int]) -> float:
    """Least cost with groups *first* on instance 0 and groups *second* on instance 1."""

    def cost(*queues: Sequence[int]) -> float:
        return total_cost(problem, order_of(queues))

    best = min(permutations(first), key=lambda queue: cost(queue, second))
    return min(cost(best, queue) for queue in permutations(second))
