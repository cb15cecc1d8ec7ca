"""Explanation of a plan: the cost of the alternative positions of each group."""

from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from solver.planning.problem.objective import (
    Prices,
    homes,
    instance_of,
    late_probability,
    prices_of,
    queue_cost,
    turns_s,
    turns_var,
)
from solver.planning.problem.problem import NONE, Ints, PlanningProblem, QueueOrder


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
    """Probability that a request of the group is late; at least the share that was relegated."""
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
    late = np.maximum(problem.groups.relegated_share, late_probability(problem, order))
    turns = turns_s(problem, order)
    turn_sd_s = np.sqrt(turns_var(problem, order))
    instance, prices = instance_of(problem, order), prices_of(problem)
    ranked = np.lexsort((turns, -late))
    return tuple(
        PlacedGroup(
            group=int(group),
            instance=int(instance[group]),
            position=_position(order, int(instance[group]), int(group)),
            turn_s=float(turns[group]),
            turn_sd_s=float(turn_sd_s[group]),
            late_probability=float(late[group]),
            others=_others(problem, order, prices, int(group), int(instance[group]))[:others]
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
    problem: PlanningProblem, order: QueueOrder, prices: Prices, group: int, instance: int
) -> tuple[OtherPlace, ...]:
    if instance == NONE:
        return ()

    def cost(of: int, queue: Ints) -> float:
        return queue_cost(problem, of, queue, prices)

    own = order.queue(instance)
    gain = cost(instance, own) - cost(instance, own[own != group])
    price = float(prices.move[group])
    home = int(homes(problem)[group])
    paid = price if home not in (NONE, instance) else 0.0
    found = []
    for other in range(problem.num_instances):
        if problem.may_serve(other, group):
            queue = order.queue(other)
            rest = queue[queue != group]
            places = range(len(rest) + 1)
            costs = np.array([cost(other, np.insert(rest, at, group)) for at in places])
            if other == instance:
                costs[_position(order, instance, group)] = np.inf
            position = int(np.argmin(costs))
            move = price if home not in (NONE, other) else 0.0
            extra = float(costs[position] - cost(other, rest) - gain + move - paid)
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
