"""Proposals of the annealer: move or exchange single groups, blocks of one model, and tails."""

from solver.jit import inlined
from solver.planning.search.chance import Chance, below, unit
from solver.planning.search.evaluation import TOO_MUCH
from solver.planning.search.runs import Run, between, within
from solver.planning.search.state import State
from solver.planning.search.tables import LATE, OVER, Tables

LATE_BIAS = 0.3
"""
Share of proposals that draw three groups at random and use the group with the largest late cost.
"""
SNAP = 0.8
"""Share of proposed places that are next to a group of the same model."""
BY_DUE = 0.9
"""
Share of the places proposed next to a group of the same model at which groups stay in order of
deadlines.
"""
LOST = 0.9
"""Late share from which a group counts as lost; lost groups are placed after other groups."""
WHOLE = 0.5
"""Share of block moves that move a whole block; other block moves move a part of a block."""
ALIKE = 0.9
"""Share of exchange proposals between two groups of one model."""


@inlined
def relocate(tables: Tables, state: State, chance: Chance, allowance: float) -> float:
    """Move one group to another place. Returns the added cost, or `TOO_MUCH`, as `within` does."""
    group = _pick(tables, state, chance)
    place = state.place[group]
    run = Run(state.instance[group], place, place + 1, place)
    return _move(tables, state, chance, run, allowance)


@inlined
def relocate_block(tables: Tables, state: State, chance: Chance, allowance: float) -> float:
    """Move neighbouring groups of one model together to another place."""
    group = _pick(tables, state, chance)
    instance, start = state.instance[group], state.place[group]
    end = _block_end(tables, state, instance, start)
    if unit(chance) < WHOLE:
        start = _block_start(tables, state, instance, start)
    else:
        end = start + 1 + below(chance, end - start)
    return _move(tables, state, chance, Run(instance, start, end, start), allowance)


@inlined
def exchange(tables: Tables, state: State, chance: Chance, allowance: float) -> float:
    """
    Exchange the places of two groups.

    If the two groups have one model and are in two queues, each goes to its place by deadline.
    """
    group = _pick(tables, state, chance)
    alike = unit(chance) < ALIKE
    other = _same_model_group(tables, chance, group) if alike else _any(tables, chance)
    here, there = state.instance[group], state.instance[other]
    start, other_start = state.place[group], state.place[other]
    if here == there:
        first, second = min(start, other_start), max(start, other_start)
        if first == second:
            return TOO_MUCH
        run, other_run = Run(here, first, first + 1, 0), Run(here, second, second + 1, 0)
        return within(tables, state, run, other_run, allowance)
    place, other_place = start, other_start
    if alike:
        place = _due_place(tables, state, here, start, other)
        other_place = _due_place(tables, state, there, other_start, group)
    run = Run(here, start, start + 1, place)
    other_run = Run(there, other_start, other_start + 1, other_place)
    return between(tables, state, run, other_run, allowance)


@inlined
def exchange_blocks(tables: Tables, state: State, chance: Chance, allowance: float) -> float:
    """Exchange two consecutive blocks of a queue."""
    group = _pick(tables, state, chance)
    instance = state.instance[group]
    start = _block_start(tables, state, instance, state.place[group])
    middle = _block_end(tables, state, instance, start)
    if middle == state.length[instance]:
        return TOO_MUCH
    end = _block_end(tables, state, instance, middle)
    first, second = Run(instance, start, middle, 0), Run(instance, middle, end, 0)
    return within(tables, state, first, second, allowance)


@inlined
def exchange_tails(tables: Tables, state: State, chance: Chance, allowance: float) -> float:
    """Exchange the tails of two queues."""
    group = _pick(tables, state, chance)
    here, place = state.instance[group], state.place[group]
    there, other_place = _random_place(tables, state, chance, group)
    if here == there:
        return TOO_MUCH
    tail = Run(here, place, state.length[here], place)
    other = Run(there, other_place, state.length[there], other_place)
    return between(tables, state, tail, other, allowance)


@inlined
def _move(tables: Tables, state: State, chance: Chance, run: Run, allowance: float) -> float:
    """Move the groups of *run* to a random place, drawn for the first group of *run*."""
    here = run.instance
    there, place = _random_place(tables, state, chance, state.queue[here, run.start])
    if here != there:
        return between(tables, state, run, Run(there, place, place, place), allowance)
    if place < run.start:
        return within(tables, state, Run(here, place, run.start, 0), run, allowance)
    if place > run.end:
        return within(tables, state, run, Run(here, run.end, place, 0), allowance)
    return TOO_MUCH


@inlined
def _any(tables: Tables, chance: Chance) -> int:
    return int(tables.served[below(chance, len(tables.served))])


@inlined
def _same_model_group(tables: Tables, chance: Chance, group: int) -> int:
    """A random group of the model of *group*, possibly *group* itself."""
    model = tables.model[group]
    first, end = tables.first_served[model], tables.first_served[model + 1]
    return int(tables.served[first + below(chance, end - first)])


@inlined
def _pick(tables: Tables, state: State, chance: Chance) -> int:
    group = _any(tables, chance)
    if unit(chance) < LATE_BIAS:
        for _ in range(2):
            other = _any(tables, chance)
            if _late_cost(tables, state, other) > _late_cost(tables, state, group):
                group = other
    return group


@inlined
def _late_cost(tables: Tables, state: State, group: int) -> float:
    return float(state.late[group] * tables.rows[0, group, LATE])


@inlined
def _random_place(tables: Tables, state: State, chance: Chance, group: int) -> tuple[int, int]:
    """A random instance, and a position in its queue at which *group* could be inserted."""
    if unit(chance) >= SNAP:
        instance = below(chance, len(state.length))
        return instance, 1 + below(chance, state.length[instance])
    fellow = _same_model_group(tables, chance, group)
    instance, place = state.instance[fellow], state.place[fellow]
    if unit(chance) < BY_DUE:
        return instance, _due_place(tables, state, instance, place, group)
    return instance, place + below(chance, 2)


@inlined
def _due_place(tables: Tables, state: State, instance: int, near: int, group: int) -> int:
    """
    Place of *group* by deadline in the block around *near*: before groups that are later or lost.
    """
    device = tables.device[instance]
    over_s = tables.rows[device, group, OVER]
    place = _block_start(tables, state, instance, near)
    end = _block_end(tables, state, instance, near)
    while place < end:
        other = state.queue[instance, place]
        if tables.rows[device, other, OVER] < over_s or state.late[other] > LOST:
            break
        place += 1
    return place


@inlined
def _block_start(tables: Tables, state: State, instance: int, place: int) -> int:
    model = tables.model[state.queue[instance, place]]
    while place > 1 and tables.model[state.queue[instance, place - 1]] == model:
        place -= 1
    return place


@inlined
def _block_end(tables: Tables, state: State, instance: int, place: int) -> int:
    model = tables.model[state.queue[instance, place]]
    length = state.length[instance]
    while place < length and tables.model[state.queue[instance, place]] == model:
        place += 1
    return place
