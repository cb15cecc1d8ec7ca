"""Assignments without information: round robin and random."""

from collections.abc import Iterable

import numpy as np

from solver.planning.orders.queues import Queues, order_of
from solver.planning.problem.problem import PlanningProblem, QueueOrder


def round_robin(problem: PlanningProblem) -> QueueOrder:
    """
    Round robin over the instances that may serve the group, regardless of their speed.

    Source: QLM §8.3, figure 14.
    Differs: inside a queue, EDF with model batching replaces the authors' generator.
    """
    queues: list[list[int]] = [[] for _ in range(problem.num_instances)]
    able_of = Queues(problem).able
    turn = 0
    for group in range(problem.num_groups):
        able = able_of(group)
        if len(able):
            later = able[able >= turn]
            instance = int(later[0] if len(later) else able[0])
            queues[instance].append(group)
            turn = instance + 1
    return order_of([_batched(problem, queue) for queue in queues])


def by_chance(problem: PlanningProblem, random: np.random.Generator) -> QueueOrder:
    """
    Assign each group to a random instance that may serve it.

    Source: QLM §8.3, the random policy.
    Differs: inside a queue, EDF with model batching replaces the authors' generator.
    """
    queues: list[list[int]] = [[] for _ in range(problem.num_instances)]
    able_of = Queues(problem).able
    for group in range(problem.num_groups):
        able = able_of(group)
        if len(able):
            queues[int(random.choice(able))].append(group)
    return order_of([_batched(problem, queue) for queue in queues])


def _batched(problem: PlanningProblem, queue: Iterable[int]) -> list[int]:
    """Order *queue* by model, the model with the earliest deadline first; EDF within each model."""
    groups = problem.groups
    by_deadline = sorted(queue, key=lambda group: groups.deadline_s[group])
    first: dict[int, int] = {}
    for rank, group in enumerate(by_deadline):
        first.setdefault(int(groups.model[group]), rank)
    return sorted(by_deadline, key=lambda group: first[int(groups.model[group])])
