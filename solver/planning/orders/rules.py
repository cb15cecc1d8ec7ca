"""Order rules: earliest deadline first, with and without model batching, and oldest first."""

import numpy as np

from solver.planning.orders.queues import Queues, dispatched, given_out
from solver.planning.problem.problem import Ints, PlanningProblem, QueueOrder


def edf(problem: PlanningProblem) -> QueueOrder:
    """
    The earliest deadline first, each group on the instance that would finish it first.

    Source: QLM §8, the EDF baseline.
    """
    ranking = np.argsort(problem.groups.deadline_s, kind="stable")
    return given_out(problem, ranking.tolist())


def edf_batching(problem: PlanningProblem) -> QueueOrder:
    """
    EDF with model batching.

    The instance that is free first takes the group of its model with the earliest deadline. If its
    model has no groups left, the instance takes the group with the earliest deadline of any model.

    Source: the EDF baseline of QLM §8; request groups of one model are batched to save swaps.
    """
    return dispatched(problem, _same_model_first)


def _same_model_first(queues: Queues, instance: int, candidates: Ints) -> int:
    groups = queues.problem.groups
    same = candidates[groups.model[candidates] == queues.resident[instance]]
    pool = same if len(same) else candidates
    return int(pool[np.argmin(groups.deadline_s[pool])])


def fcfs(problem: PlanningProblem) -> QueueOrder:
    """
    First come first served: the oldest group first, each on the instance that would finish it
    first.

    The age of a group follows from its SLO and deadline; groups without an SLO come last.

    Source: QLM §8, the vLLM baseline.
    """
    with np.errstate(invalid="ignore"):
        arrived_s = problem.groups.deadline_s - problem.groups.slo_s
    known_s = np.where(np.isnan(arrived_s), np.inf, arrived_s)
    return given_out(problem, np.argsort(known_s, kind="stable").tolist())
