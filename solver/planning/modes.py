"""QLM's other targets as transformations of a problem: waiting times, strict priorities."""

from dataclasses import replace

import numpy as np

from solver.planning.problem import Ints, PlanningProblem

PRIORITY_RATIO = 100.0
"""Between the weights of neighbouring priorities: in effect lexicographic, by measurement."""
MAX_PRIORITIES = 5
"""More would lose the lowest in rounding: weights would span over 8 decimal orders."""


def waiting_time_only(problem: PlanningProblem) -> PlanningProblem:
    """
    The same with SLOs on waiting: a request is in time when its turn comes in time.

    Source: QLM appendix A.3.
    """
    groups = problem.groups
    return replace(
        problem,
        groups=replace(
            groups,
            tail_s=np.zeros_like(groups.tail_s),
            tail_var=np.zeros_like(groups.tail_var),
        ),
    )


def strict_priorities(problem: PlanningProblem, priority: Ints) -> PlanningProblem:
    """
    The same with priorities instead of SLOs: high ones first, each of them as early as can be.

    A group's weight is its requests times `PRIORITY_RATIO` to the power of its rank, no group has
    a deadline, and completion times count as much as late requests did. Of *priority*, int32[I],
    lower ones go first, as in the paper.

    Raises:
        ValueError: When there are more than `MAX_PRIORITIES` different ones.

    Source: QLM appendix A.3.
    Differs: weights instead of constraints; work that is `PRIORITY_RATIO` times as short a request
        can still go before a higher priority.
    """
    levels, level = np.unique(priority, return_inverse=True)
    if len(levels) > MAX_PRIORITIES:
        raise ValueError(f"{len(levels)} priorities; at most {MAX_PRIORITIES} can be told apart")
    groups = problem.groups
    never = np.full(problem.num_groups, np.inf)
    return replace(
        problem,
        groups=replace(
            groups,
            weight=groups.num_requests * PRIORITY_RATIO ** (len(levels) - 1.0 - level),
            deadline_s=never,
            spread_s=np.zeros(problem.num_groups),
            slo_s=never,
        ),
        objective=replace(problem.objective, waiting=1.0),
    )
