"""
The baseline SHEPHERD for language models: an integer program places models on instances; each
instance serves static batches by EDF.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ops.baselines.planning.shepherd_partition import partition
from solver.planning.orders.queues import Queues, order_of
from solver.planning.problem.problem import Ints, PlanningProblem, QueueOrder

Partition = Callable[[PlanningProblem], NDArray[np.bool_]]

STATIC_BATCH = 32
"""
Number of requests of a static batch, which runs until its longest request ends; any such batch must
fit.
"""
PREEMPTS_FROM = 3.0
"""Ratio of the sizes of two batches from which the larger batch is served first."""


def shepherd(problem: PlanningProblem, *, partitioned: Partition = partition) -> QueueOrder:
    """
    Each instance hosts the models that a program assigned to it, and serves them by deadline.

    A group goes to the host that would finish it first. Of the groups whose first batch can
    be in time, the earliest deadline is next, unless the batch of another group is `PREEMPTS_FROM`
    times as large: that group preempts. Groups that cannot be in time come last.

    Source: QLM §8, the SHEPHERD baseline; SHEPHERD (NSDI 2023), Herd and Flex.
    Differs: Flex preempts when the larger batch arrives; here the whole queue is known, so
        the larger batch is served first. Flex drops infeasible requests; here every group is
        served. Where plans are evaluated on an engine with continuous batching, SHEPHERD runs
        faster than with its static batches.
    """
    static = static_batches(problem)
    hosts = partitioned(static)
    queues = Queues(static)
    for group in np.argsort(problem.groups.deadline_s, kind="stable").tolist():
        able = np.flatnonzero(hosts[:, problem.groups.model[group]])
        if len(able):
            done_s = (
                queues.free_s[able] + static.groups.work_s[static.instances.device[able], group]
            )
            queues.append(int(able[np.argmin(done_s)]), group)
    given = queues.order()
    return order_of([_served(static, g, given.queue(g)) for g in range(problem.num_instances)])


def static_batches(problem: PlanningProblem) -> PlanningProblem:
    """
    Copy of a problem with its work in fixed batches of deterministic time, as assumed by SHEPHERD.

    A batch takes as long as its longest output. Of B requests, that is the mean and about
    sqrt(2 ln B) standard deviations; the requests of a group have equal shares of its work.
    """
    groups = problem.groups
    requests = np.maximum(1.0, groups.num_requests)
    work_s = np.maximum(1e-12, groups.work_s)
    variation = np.sqrt(groups.work_var * requests) / work_s
    longest = 1 + variation * np.sqrt(2 * np.log(np.minimum(requests, STATIC_BATCH)))
    return replace(
        problem,
        groups=replace(
            groups,
            work_s=groups.work_s * longest,
            work_var=np.zeros_like(groups.work_var),
            tail_var=np.zeros_like(groups.tail_var),
        ),
    )


def _served(static: PlanningProblem, instance: int, queue: Ints) -> Sequence[int]:
    """Reorder *queue*, which is sorted by deadline, into SHEPHERD's order of service."""
    groups = static.groups
    queues = Queues(static)
    served: list[int] = []
    left = queue
    while len(left):
        first = np.minimum(1.0, STATIC_BATCH / groups.num_requests[left])
        first_s = queues.setup_s(instance, left) + first * queues.work_s(instance, left)
        in_time = left[queues.free_s[instance] + first_s <= groups.deadline_s[left]]
        if len(in_time) == 0:
            break
        batch = np.minimum(groups.num_requests[in_time], STATIC_BATCH)
        largest = int(np.argmax(batch))
        chosen = int(in_time[largest if batch[largest] >= PREEMPTS_FROM * batch[0] else 0])
        queues.append(instance, chosen)
        served.append(chosen)
        left = left[left != chosen]
    return [*served, *left.tolist()]
