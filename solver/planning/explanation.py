"""Explanation of a plan: the cost of the alternative positions of each group."""

from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from solver.planning.problem.objective import (
    homes,
    instance_of,
    late_probability,
    queue_cost,
    turns_s,
    turns_var,
)
from solver.planning.problem.problem import NONE, Floats, Ints, PlanningProblem, QueueOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlace:
    """
    The cheapest position in one virtual queue to which a group could move, with the cost of the
    move.
    """

    instance: int
    position: int
    """Position of the group, from 0, in the queue without the group."""
    extra_cost: float
    """
    Increase of the plan's cost if the group moves to this position; negative if the position is
    better.
    """
    turn_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """One request group in a plan."""

    group: int
    instance: int
    """Instance that serves the group; `NONE` if no instance may serve it."""
    position: int
    turn_s: Seconds
    """Mean time until the group is served; infinite if the group is in no queue."""
    turn_sd_s: Seconds
    """
    Standard deviation of `turn_s`, the time until the group is served; infinite if the group is in
    no queue.
    """
    late_probability: float
    others: tuple[OtherPlace, ...] = ()
    """The cheapest position of the group in each other queue; the cheapest positions come first."""


def explain(
    problem: PlanningProblem, order: QueueOrder, *, most: int, others: int = 3
) -> tuple[PlacedGroup, ...]:
    """
    Explanations of all groups of *order*, the likeliest to be late first.

    Args:
        most: Number of groups, from the first, for which alternative positions are computed;
            explaining a group takes some hundreds of microseconds per waiting group.
        others: Maximum number of alternative positions reported for each group.
    """
    late, turns = late_probability(problem, order), turns_s(problem, order)
    turn_sd_s = np.sqrt(turns_var(problem, order))
    instance = instance_of(problem, order)
    ranked = np.lexsort((turns, -late))
    return tuple(
        PlacedGroup(
            group=int(group),
            instance=int(instance[group]),
            position=_position(order, int(instance[group]), int(group)),
            turn_s=float(turns[group]),
            turn_sd_s=float(turn_sd_s[group]),
            late_probability=float(late[group]),
            others=_others(problem, order, int(group), int(instance[group]))[:others]
            if rank < most
            else (),
        )
        for rank, group in enumerate(ranked)
    )


def _position(order: QueueOrder, instance: int, group: int) -> int:
    if instance == NONE:
        return 0
    return int(np.flatnonzero(order.queue(instance) == group)[0])


def _others(
    problem: PlanningProblem, order: QueueOrder, group: int, instance: int
) -> tuple[OtherPlace, ...]:
    if instance == NONE:
        return ()
    own = order.queue(instance)
    gain = queue_cost(problem, instance, own) - queue_cost(problem, instance, own[own != group])
    price = problem.objective.moved / max(1, problem.num_groups)
    home = int(homes(problem)[group])
    paid = price if home not in (NONE, instance) else 0.0
    found = []
    for other in range(problem.num_instances):
        if problem.may_serve(other, group):
            queue = order.queue(other)
            rest = queue[queue != group]
            costs = _insertion_costs(problem, other, rest, group)
            if other == instance:
                costs[_position(order, instance, group)] = np.inf
            position = int(np.argmin(costs))
            move = price if home not in (NONE, other) else 0.0
            extra = float(costs[position] - queue_cost(problem, other, rest) - gain + move - paid)
            if np.isfinite(extra):
                found.append((extra, other, position, rest))
    return tuple(
        OtherPlace(
            instance=other,
            position=position,
            extra_cost=extra,
            turn_s=_turn_s(problem, order, other, np.insert(rest, position, group), group),
        )
        for extra, other, position, rest in sorted(found, key=lambda place: place[:3])
    )


def _insertion_costs(problem: PlanningProblem, instance: int, rest: Ints, group: int) -> Floats:
    """
    Cost of the virtual queue with the group inserted at each position, float64[len(rest) + 1].
    """
    return np.array(
        [
            queue_cost(problem, instance, np.insert(rest, place, group))
            for place in range(len(rest) + 1)
        ]
    )


def _turn_s(
    problem: PlanningProblem, order: QueueOrder, instance: int, queue: Ints, group: int
) -> Seconds:
    """Time until *group* is served if the virtual queue of *instance* were *queue*."""
    queues = [order.queue(index) for index in range(problem.num_instances)]
    queues = [each[each != group] for each in queues]
    queues[instance] = queue
    starts = np.cumsum([0, *(len(each) for each in queues)]).astype(np.int32)
    changed = QueueOrder(groups=np.concatenate(queues).astype(np.int32), starts=starts)
    return float(turns_s(problem, changed)[group])
