"""First come, first served: how vLLM orders requests."""

import numpy as np

from solver.planning.order_baselines.queues import given_out
from solver.planning.problem import PlanningProblem, QueueOrder


def fcfs(problem: PlanningProblem) -> QueueOrder:
    """
    The oldest group first, each to the instance that would have done it first.

    A group is as old as its SLO and its deadline say; groups without SLO come last.

    Source: QLM §8, the vLLM baseline.
    """
    with np.errstate(invalid="ignore"):
        arrived_s = problem.groups.deadline_s - problem.groups.slo_s
    known_s = np.where(np.isnan(arrived_s), np.inf, arrived_s)
    return given_out(problem, np.argsort(known_s, kind="stable").tolist())
