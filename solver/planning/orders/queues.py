"""Partially built virtual queues, for rules that assign one group after another."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from solver.planning.problem.problem import Floats, Ints, PlanningProblem, QueueOrder

OrderPolicy = Callable[[PlanningProblem], QueueOrder]
"""
Deterministic function from a problem to a plan.

Each group that some instance may serve is in exactly one queue; other groups are in no queue.
"""

Choice = Callable[["Queues", int, Ints], int]
"""Selects the group that an instance serves next, from the indices of groups, int[1 or more]."""


class Queues:
    """Partial queue of each instance, and the mean time at which the instance becomes free."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.free_s: Floats = problem.instances.available_s.copy()
        """Mean time at which each instance becomes free, [G]."""
        self.resident: Ints = problem.instances.active.copy()
        """Model at the end of the queue of each instance, [G]."""
        self._drain_s = problem.instances.drain_s.copy()
        self._fits = np.isfinite(problem.instances.activate_s)
        self._queues: list[list[int]] = [[] for _ in range(problem.num_instances)]

    def able(self, group: int) -> Ints:
        """Instances that may serve *group*; the result can be empty."""
        fits = self._fits[:, self.problem.groups.model[group]]
        return np.flatnonzero(fits).astype(np.int32)

    def may_take(self, instance: int, groups: Ints) -> NDArray[np.bool_]:
        """For each of *groups*, True if *instance* may serve it."""
        fits: NDArray[np.bool_] = self._fits[instance, self.problem.groups.model[groups]]
        return fits

    def setup_s(self, instance: int, groups: Ints) -> Floats:
        """Time of the drain and the activation on *instance* before it serves each of *groups*."""
        model = self.problem.groups.model[groups]
        activate_s = self.problem.instances.activate_s[instance, model]
        change_s = self._drain_s[instance] + activate_s
        return np.where(model == self.resident[instance], 0.0, change_s)

    def work_s(self, instance: int, groups: Ints) -> Floats:
        """Mean time for which each of *groups* would occupy *instance*."""
        device = self.problem.instances.device[instance]
        work_s: Floats = self.problem.groups.work_s[device, groups]
        return work_s

    def append(self, instance: int, group: int) -> None:
        """Put *group* at the end of the queue of *instance*, including a model swap if needed."""
        groups = np.array([group], dtype=np.int32)
        setup_s, work_s = self.setup_s(instance, groups)[0], self.work_s(instance, groups)[0]
        self.free_s[instance] += setup_s + work_s
        self.resident[instance] = self.problem.groups.model[group]
        device = self.problem.instances.device[instance]
        self._drain_s[instance] = self.problem.groups.drain_s[device, group]
        self._queues[instance].append(group)

    def order(self) -> QueueOrder:
        """The virtual queues of all instances as a plan."""
        return order_of(self._queues)


def order_of(queues: Sequence[Sequence[int]]) -> QueueOrder:
    """A plan from one virtual queue per instance; the head of each queue comes first."""
    return QueueOrder(
        groups=np.array([group for queue in queues for group in queue], dtype=np.int32),
        starts=np.cumsum([0, *map(len, queues)]).astype(np.int32),
    )


def given_out(problem: PlanningProblem, ranking: Iterable[int]) -> QueueOrder:
    """
    Assign the groups in the order of *ranking*, each to the instance that would finish it first.

    The times include model swaps, but the choice of the instance ignores the time of a swap.
    """
    queues = Queues(problem)
    for group in ranking:
        able = queues.able(group)
        if len(able):
            work_s = problem.groups.work_s[problem.instances.device[able], group]
            queues.append(int(able[np.argmin(queues.free_s[able] + work_s)]), group)
    return queues.order()


def dispatched(problem: PlanningProblem, choose: Choice) -> QueueOrder:
    """
    Plan in which the instance that is free first gets the group that *choose* selects, until no
    group is left.
    """
    queues = Queues(problem)
    left = np.arange(problem.num_groups, dtype=np.int32)
    working = np.ones(problem.num_instances, dtype=np.bool_)
    while working.any() and len(left):
        instance = int(np.argmin(np.where(working, queues.free_s, np.inf)))
        candidates = left[queues.may_take(instance, left)]
        if len(candidates) == 0:
            working[instance] = False
            continue
        group = choose(queues, instance, candidates)
        queues.append(instance, group)
        left = left[left != group]
    return queues.order()
