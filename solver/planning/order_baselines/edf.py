"""Earliest deadline first, blind to models and with model batching."""

import numpy as np

from solver.planning.order_baselines.queues import Queues, dispatched, given_out
from solver.planning.problem import Ints, PlanningProblem, QueueOrder


def edf(problem: PlanningProblem) -> QueueOrder:
    """
    The earliest deadline first, each group to the instance that would have done it first.

    Source: QLM §8, the EDF baseline.
    """
    ranking = np.argsort(problem.groups.deadline_s, kind="stable")
    return given_out(problem, ranking.tolist())


def edf_batching(problem: PlanningProblem) -> QueueOrder:
    """
    The instance that is free first goes on with its model while that has groups, the earliest
    deadline first; then it takes the earliest deadline of all and that model.

    Source: QLM §8's EDF baseline, with the request groups' batching of swaps.
    """
    return dispatched(problem, _same_model_first)


def _same_model_first(queues: Queues, instance: int, candidates: Ints) -> int:
    groups = queues.problem.groups
    same = candidates[groups.model[candidates] == queues.resident[instance]]
    pool = same if len(same) else candidates
    return int(pool[np.argmin(groups.deadline_s[pool])])
