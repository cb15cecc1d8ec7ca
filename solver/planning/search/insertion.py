"""Insertion of groups into a plan: each at its cheapest place, or at the end of a queue."""

import numpy as np

from solver.jit import inlined, kernel
from solver.planning.problem.problem import NONE
from solver.planning.search.evaluation import (
    TOO_MUCH,
    Draft,
    commit,
    draft_cost,
    queue_cost,
    refresh,
)
from solver.planning.search.state import State
from solver.planning.search.tables import Indices, Tables


@kernel
def insert(tables: Tables, state: State, groups: Indices) -> None:
    """
    Put each group of *groups*, in order, at the place where it adds the least cost to the plan.
    """
    for group in groups:
        least = TOO_MUCH
        best_instance, best_place = NONE, 0
        for instance in range(len(state.length)):
            if np.isfinite(tables.activate_s[instance, tables.model[group]]):
                added, place = _best_place(tables, state, group, instance, least)
                if added < least:
                    least, best_instance, best_place = added, instance, place
        if best_instance != NONE:
            _put(tables, state, group, best_instance, best_place)


@inlined
def put_last(tables: Tables, state: State, group: int, instance: int) -> None:
    """Put a group at the end of a virtual queue."""
    place = state.length[instance]
    state.queue[instance, place] = group
    state.length[instance] = place + 1
    refresh(tables, state, instance, place)


@inlined
def _best_place(
    tables: Tables, state: State, group: int, instance: int, limit: float
) -> tuple[float, int]:
    """
    Cost that a group adds to the queue at its cheapest place; `TOO_MUCH` if the cost is at least
    *limit*.
    """
    length, groups = state.length[instance], state.draft[0]
    for place in range(length):
        groups[place] = state.queue[instance, place]
    least, best = TOO_MUCH, 0
    now = queue_cost(state, instance)
    if tables.home[group] != NONE and tables.home[group] != instance:
        now -= tables.move_cost[group]
    for place in range(1, length + 1):
        # The overwritten group is before the next places, so it is not read again.
        groups[place - 1] = group
        draft = Draft(instance, place, groups[place - 1 : length], 1)
        added = draft_cost(tables, state, draft, min(least, limit) + now) - now
        if added < min(least, limit):
            least, best = added, place
    return least, best


@inlined
def _put(tables: Tables, state: State, group: int, instance: int, place: int) -> None:
    length, groups = state.length[instance], state.draft[0]
    groups[0] = group
    for at in range(place, length):
        groups[at - place + 1] = state.queue[instance, at]
    commit(tables, state, Draft(instance, place, groups[: length - place + 1], 1))
