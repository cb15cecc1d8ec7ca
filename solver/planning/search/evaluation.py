"""
Cost of changed queues, computed from the first changed place until further costs are unchanged.
"""

import math
from typing import NamedTuple

import numpy as np

from solver.jit import inlined, kernel
from solver.planning.problem.problem import NONE, Floats
from solver.planning.search.normal import LIMIT, probability_below
from solver.planning.search.state import COMMON, COST, SWAPS, TIME, VAR, State
from solver.planning.search.tables import (
    DRAIN,
    LATE,
    LEAST_OVER,
    MILESTONES,
    MOST_OVER,
    MOST_TARDY,
    MOST_VAR,
    OVER,
    PER_MILESTONE,
    TARDY,
    WAITING,
    WORK,
    WORK_VAR,
    Indices,
    Tables,
)

TOO_MUCH = np.inf
"""Result if the cost of a changed queue exceeds a bound; the exact cost was not computed."""
_NO_COST = 1e-13
_NO_MORE = 1e-9
"""
Rounding tolerance when times and variances of two queues are compared, in seconds and square
seconds.
"""


class Draft(NamedTuple):
    """A possible replacement of the end of a virtual queue."""

    instance: int
    place: int
    """Position in the queue of the first group that the draft replaces."""
    groups: Indices
    same: int
    """
    Index in the draft from which its groups equal those at the end of the current queue, in the
    same order.
    """


class Turn(NamedTuple):
    """
    Time at which serving a group begins, after drain and activation, and the uncertainty of this
    time.
    """

    start_s: float
    var: float
    """Variance of `start_s`, including the throughput errors that are common to a model's work."""
    own_s: float
    """Seconds of work of the group's model before the group is served."""
    error_var: float
    """Squared relative error of the throughput of the group's model."""


@inlined
def late_share(row: Floats, normal: Floats, turn: Turn) -> float:
    """Expected share of a group's requests that are late."""
    work_s, own_s, error_var = row[WORK], turn.own_s, turn.error_var
    far = LIMIT * LIMIT * (turn.var + row[MOST_VAR] + error_var * work_s * (2 * own_s + work_s))
    most_over_s = turn.start_s + row[MOST_OVER]
    if most_over_s < 0 and most_over_s * most_over_s >= far:
        return 0.0
    least_over_s = turn.start_s + row[LEAST_OVER]
    if least_over_s > 0 and least_over_s * least_over_s >= far:
        return 1.0
    late = 0.0
    for at in range(MILESTONES, len(row), PER_MILESTONE):
        over_s, done_s = turn.start_s + row[at], row[at + 2]
        over_var = turn.var + row[at + 1] + error_var * done_s * (2 * own_s + done_s)
        if over_var > 0:
            late += probability_below(normal, over_s / math.sqrt(over_var))
        elif over_s > 0:
            late += 1.0
    return late * PER_MILESTONE / (len(row) - MILESTONES)


@inlined
def end_cost(row: Floats, end_s: float) -> float:
    """Cost of the tardiness and waiting of a group that occupies its instance until *end_s*."""
    cost = row[WAITING] * end_s
    over_s = end_s + row[OVER]
    if over_s > 0:
        cost += min(over_s * row[TARDY], row[MOST_TARDY])
    return float(cost)


@inlined
def setup_of(tables: Tables, instance: int, last: int, group: int) -> float:
    """Seconds from the end of group *last* until serving the next group begins."""
    model = tables.model[group]
    if model == tables.model[last]:
        return 0.0
    drain_s = tables.rows[tables.device[instance], last, DRAIN]
    return float(drain_s + tables.activate_s[instance, model])


@inlined
def swap_cost(tables: Tables, instance: int, last: int, group: int) -> float:
    """Cost of the drain and the activation between two groups on an instance."""
    model, before = tables.model[group], tables.model[last]
    if model == before:
        return 0.0
    drain_s = tables.rows[tables.device[instance], last, DRAIN]
    return float(tables.second_cost * drain_s + tables.activation_cost[instance, before, model])


@inlined
def draft_cost(tables: Tables, state: State, draft: Draft, bound: float) -> float:
    """
    Cost of the drafted queue, or `TOO_MUCH` when it exceeds *bound*.

    The groups after `draft.same` keep their order. If they begin no later than in the current queue
    and cost nothing there, they cost nothing in the draft. If they begin later, their current cost
    is a lower bound of their cost in the draft.
    """
    instance, groups = draft.instance, draft.groups
    device = tables.device[instance]
    last = state.queue[instance, draft.place - 1]
    before, end = state.after[last], state.after[last_of(state, instance)]
    time_s, var, common, cost = before[TIME], before[VAR], before[COMMON], before[COST]
    done = state.ahead
    for m in range(len(done)):
        done[m] = state.done[last, m]
    for n in range(len(groups)):
        group = groups[n]
        model, row = tables.model[group], tables.rows[device, group]
        setup_s = setup_of(tables, instance, last, group)
        error_var, own_s, work_s = tables.error_var[device, model], done[model], row[WORK]
        turn = Turn(time_s + setup_s, var + common, own_s, error_var)
        time_s += setup_s + work_s
        cost += row[LATE] * late_share(row, tables.normal, turn)
        cost += end_cost(row, time_s) + swap_cost(tables, instance, last, group)
        var += row[WORK_VAR]
        common += error_var * work_s * (2 * own_s + work_s)
        done[model] = own_s + work_s
        last = group
        rest, now = 0.0, state.after[group]
        if n >= draft.same:
            rest = end[COST] - now[COST]
            swaps_cost = end[SWAPS] - now[SWAPS]
            earlier = time_s <= now[TIME] and var <= now[VAR] + _NO_MORE
            if earlier and rest - swaps_cost < _NO_COST and _no_more(done, state.done[group]):
                cost += rest
                break
            if time_s <= now[TIME]:
                rest = 0.0
        if cost + rest > bound:
            return TOO_MUCH
    return float(cost) if cost <= bound else TOO_MUCH


@inlined
def _no_more(values: Floats, limits: Floats) -> bool:
    for n in range(len(values)):  # noqa: SIM110 - compiled
        if values[n] > limits[n] + _NO_MORE:
            return False
    return True


@inlined
def commit(tables: Tables, state: State, draft: Draft) -> None:
    """Replace the end of the virtual queue by the draft."""
    for n in range(len(draft.groups)):
        state.queue[draft.instance, draft.place + n] = draft.groups[n]
    state.length[draft.instance] = draft.place + len(draft.groups)
    refresh(tables, state, draft.instance, draft.place)


@inlined
def refresh(tables: Tables, state: State, instance: int, place: int) -> None:
    """Update the accumulated values of a queue in the search state from *place* on."""
    state.changed[instance] = True
    device = tables.device[instance]
    for at in range(place, state.length[instance]):
        last, group = state.queue[instance, at - 1], state.queue[instance, at]
        before, after = state.after[last], state.after[group]
        model, row = tables.model[group], tables.rows[device, group]
        for m in range(state.done.shape[1]):
            state.done[group, m] = state.done[last, m]
        setup_s = setup_of(tables, instance, last, group)
        error_var = tables.error_var[device, model]
        own_s, work_s = state.done[last, model], row[WORK]
        turn = Turn(before[TIME] + setup_s, before[VAR] + before[COMMON], own_s, error_var)
        late = late_share(row, tables.normal, turn)
        end_s = turn.start_s + work_s
        swap = swap_cost(tables, instance, last, group)
        cost = row[LATE] * late + end_cost(row, end_s) + swap
        after[TIME] = end_s
        after[VAR] = before[VAR] + row[WORK_VAR]
        after[COMMON] = before[COMMON] + error_var * work_s * (2 * own_s + work_s)
        after[COST] = before[COST] + cost
        after[SWAPS] = before[SWAPS] + swap
        state.done[group, model] = own_s + work_s
        state.late[group] = late
        state.instance[group] = instance
        state.place[group] = at


@inlined
def last_of(state: State, instance: int) -> int:
    """The last group of the queue, or the running work if the queue has no groups."""
    return int(state.queue[instance, state.length[instance] - 1])


@inlined
def queue_cost(state: State, instance: int) -> float:
    """Cost of all groups in the virtual queue, and of its drains and activations."""
    return float(state.after[last_of(state, instance), COST])


@kernel
def load(tables: Tables, state: State, groups: Indices, starts: Indices) -> None:
    """Set the queues in *state* to the queues of a `QueueOrder`."""
    state.instance[: len(tables.home)] = NONE
    for instance in range(len(state.length)):
        queue = groups[starts[instance] : starts[instance + 1]]
        commit(tables, state, Draft(instance, 1, queue, len(queue)))


@kernel
def total_cost(tables: Tables, state: State) -> float:
    """Cost of the plan in *state*, without groups that no instance may serve."""
    cost = 0.0
    for instance in range(len(state.length)):
        cost += queue_cost(state, instance)
    for group in tables.served:
        home = tables.home[group]
        if home != NONE and state.instance[group] != home:
            cost += tables.move_cost[group]
    return cost
