"""Cost of keeping the plan in force, and number of groups that a new plan moves."""

from collections.abc import Sequence

import numpy as np

from solver.planning.orders.queues import Queues, order_of
from solver.planning.problem.objective import homes, instance_of, plan_cost, prices_of
from solver.planning.problem.problem import NONE, PlanningProblem, QueueOrder


def total_cost(problem: PlanningProblem, order: QueueOrder) -> float:
    """
    Total cost of a plan by the planner's objective.

    Raises:
        ValueError: The plan is not valid.
    """
    return float(plan_cost(problem, order).total)


def kept(problem: PlanningProblem) -> QueueOrder:
    """
    The running plan unchanged, with arrivals added in the cheaper of two ways.

    Arrivals are added by deadline, each either at the end of the queue that ends first, or at the
    head of a queue with its model.
    """
    running = _running(problem)
    arrivals = np.flatnonzero(homes(problem) == NONE)
    by_deadline = arrivals[np.argsort(problem.groups.deadline_s[arrivals], kind="stable")]
    ways = (
        _at_ends(problem, running, by_deadline.tolist()),
        _at_heads(problem, running, by_deadline.tolist()),
    )
    return min(ways, key=lambda order: total_cost(problem, order))


def num_moved(problem: PlanningProblem, order: QueueOrder) -> int:
    """
    Number of late groups that a plan moves from their instance to another one; other moves cost
    nothing.
    """
    home = homes(problem)
    moved = (home != NONE) & (instance_of(problem, order) != home)
    return int(np.count_nonzero(moved & (prices_of(problem).move > 0)))


def _running(problem: PlanningProblem) -> list[list[int]]:
    home, position = homes(problem), problem.running.position
    queues = [np.flatnonzero(home == index) for index in range(problem.num_instances)]
    return [queue[np.argsort(position[queue], kind="stable")].tolist() for queue in queues]


def _at_ends(
    problem: PlanningProblem, running: Sequence[Sequence[int]], arrivals: Sequence[int]
) -> QueueOrder:
    queues = Queues(problem)
    for index, queue in enumerate(running):
        for group in queue:
            queues.append(index, group)
    for group in arrivals:
        able = queues.able(group)
        queues.append(int(able[np.argmin(queues.free_s[able])]), group)
    return queues.order()


def _at_heads(
    problem: PlanningProblem, running: Sequence[Sequence[int]], arrivals: Sequence[int]
) -> QueueOrder:
    heads: list[list[int]] = [[] for _ in running]
    queues = Queues(problem)
    for group in arrivals:
        able = queues.able(group)
        active = able[problem.instances.active[able] == problem.groups.model[group]]
        least = min((active if len(active) else able).tolist(), key=lambda g: len(heads[g]))
        heads[least].append(group)
    return order_of([[*head, *queue] for head, queue in zip(heads, running, strict=True)])
