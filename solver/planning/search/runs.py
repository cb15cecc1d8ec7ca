"""
Changes of a plan: two runs of consecutive groups are exchanged if the added cost is within a limit.
"""

from typing import NamedTuple

from solver.jit import inlined, kernel
from solver.planning.search.evaluation import TOO_MUCH, Draft, commit, draft_cost, queue_cost
from solver.planning.search.state import COST, State
from solver.planning.search.tables import Indices, Tables


class Run(NamedTuple):
    """
    Consecutive groups of a queue, possibly none, and the place at which other groups replace them.
    """

    instance: int
    start: int
    end: int
    """The place after the last group of the run in its queue."""
    place: int
    """The groups that replace the run go before this place, which is not inside the run."""


@kernel
def within(tables: Tables, state: State, first: Run, second: Run, allowance: float) -> float:
    """
    Exchange two runs of groups in one queue, *first* before *second*; the runs' `place` is ignored.

    Returns the added cost when it is no more than *allowance*; else `TOO_MUCH`, and the plan is
    unchanged. Moving a run means exchanging it with the groups that it passes.
    """
    instance, groups, queue = first.instance, state.draft[0], state.queue[first.instance]
    same = _copy(groups, 0, queue, second.start, second.end)
    same = _copy(groups, same, queue, first.end, second.start)
    same = _copy(groups, same, queue, first.start, first.end)
    end = _copy(groups, same, queue, second.end, state.length[instance])
    draft = Draft(instance, first.start, groups[:end], same)
    now = queue_cost(state, instance)
    if draft_cost(tables, state, draft, now + allowance) == TOO_MUCH:
        return TOO_MUCH
    commit(tables, state, draft)
    return queue_cost(state, instance) - now


@kernel
def between(tables: Tables, state: State, here: Run, there: Run, allowance: float) -> float:
    """
    Exchange a run of groups in one queue with a run in another queue.

    Returns the added cost when it is no more than *allowance*; else `TOO_MUCH`, and the plan is
    unchanged. The result is also `TOO_MUCH` if an instance may not serve a group that it would get.
    """
    price = _price(tables, state, here, there.instance)
    price += _price(tables, state, there, here.instance)
    if price == TOO_MUCH:
        return TOO_MUCH
    draft = _draft(state, state.draft[0], here, there)
    other = _draft(state, state.draft[1], there, here)
    now = queue_cost(state, here.instance) + queue_cost(state, there.instance)
    bound = now + allowance - price
    unchanged = state.after[state.queue[here.instance, draft.place - 1], COST]
    cost = draft_cost(tables, state, other, bound - unchanged)
    if cost == TOO_MUCH or draft_cost(tables, state, draft, bound - cost) == TOO_MUCH:
        return TOO_MUCH
    commit(tables, state, draft)
    commit(tables, state, other)
    return queue_cost(state, here.instance) + queue_cost(state, there.instance) - now + price


@inlined
def _draft(state: State, groups: Indices, run: Run, other: Run) -> Draft:
    """Draft of a queue with *run* replaced by *other* of another queue; written to *groups*."""
    queue, source = state.queue[run.instance], state.queue[other.instance]
    length = state.length[run.instance]
    if run.place <= run.start:
        same = _copy(groups, 0, source, other.start, other.end)
        same = _copy(groups, same, queue, run.place, run.start)
        end = _copy(groups, same, queue, run.end, length)
    else:
        same = _copy(groups, 0, queue, run.end, run.place)
        same = _copy(groups, same, source, other.start, other.end)
        end = _copy(groups, same, queue, run.place, length)
    return Draft(run.instance, min(run.place, run.start), groups[:end], same)


@inlined
def _copy(groups: Indices, at: int, queue: Indices, start: int, end: int) -> int:
    """
    Copy groups of *queue* to *groups* from index *at* on; return the index after the last copy.
    """
    for n in range(end - start):
        groups[at + n] = queue[start + n]
    return at + end - start


@inlined
def _price(tables: Tables, state: State, run: Run, target: int) -> float:
    """
    Cost of moving groups to other instances; negative for groups that return to their current
    instance, `TOO_MUCH` if a move is not allowed.
    """
    price = 0.0
    for place in range(run.start, run.end):
        group = state.queue[run.instance, place]
        if tables.activate_s[target, tables.model[group]] == TOO_MUCH:
            return TOO_MUCH
        home = tables.home[group]
        if home == run.instance:
            price += tables.move_cost[group]
        elif home == target:
            price -= tables.move_cost[group]
    return price
