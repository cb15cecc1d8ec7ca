"""Simulated annealing over whole plans, in batches of moves; the best plan is kept."""

import math
from typing import NamedTuple

import numpy as np

from solver.jit import inlined, kernel
from solver.planning.problem.problem import Floats, QueueOrder
from solver.planning.search.chance import Chance, chance_of, unit
from solver.planning.search.evaluation import TOO_MUCH, load, total_cost
from solver.planning.search.proposals import (
    exchange,
    exchange_blocks,
    exchange_tails,
    relocate,
    relocate_block,
)
from solver.planning.search.state import State
from solver.planning.search.tables import Indices, Tables

_RELOCATE = 0.35
_RELOCATE_BLOCK = _RELOCATE + 0.08
_EXCHANGE = _RELOCATE_BLOCK + 0.30
_EXCHANGE_BLOCKS = _EXCHANGE + 0.01
"""
Cumulative shares of the kinds of proposals; the remaining proposals exchange the tails of two
queues.
"""
_PER_TEMPERATURE = 64
"""Number of moves that are tried at each temperature."""
_BETTER = 1e-12
"""Least decrease of a plan's cost that counts as an improvement."""


class Best(NamedTuple):
    """The cheapest plan found so far; mutable."""

    queue: Indices
    length: Indices
    costs: Floats
    """Cost of the plan in the annealer's state, and cost of the cheapest plan so far, [2]."""


class Cooling(NamedTuple):
    """One batch of moves: number of moves, first temperature and last temperature."""

    num_moves: int
    hot: float
    cold: float


class Annealer:
    """
    Improves the plan in *state*, which contains every group that some instance may serve.

    Equal seeds and calls give equal plans. A temperature is a cost: a change that adds this cost is
    accepted with probability 1/e.

    Source: simulated annealing, Kirkpatrick 1983. The threshold is drawn before a change is
    evaluated, so that the evaluation can stop when the cost exceeds the threshold.
    """

    def __init__(self, tables: Tables, state: State, *, seed: int) -> None:
        self._tables, self._state = tables, state
        self._chance = chance_of(seed)
        cost = total_cost(tables, state)
        self._best = Best(
            queue=state.queue.copy(), length=state.length.copy(), costs=np.array([cost, cost])
        )
        state.changed[:] = False

    @property
    def best_cost(self) -> float:
        return float(self._best.costs[1])

    def run(self, num_moves: int, *, hot: float, cold: float) -> None:
        """Try *num_moves* changes while the temperature falls from *hot* to *cold*, above 0."""
        cooling = Cooling(num_moves, hot, cold)
        anneal(self._tables, self._state, self._best, self._chance, cooling)

    def restart(self, order: QueueOrder) -> None:
        """
        Continue the search from *order*, a plan for the same groups; the cheapest plan so far is
        kept.
        """
        groups, starts = order.groups.astype(np.int64), order.starts.astype(np.int64)
        load(self._tables, self._state, groups, starts)
        self._best.costs[0] = total_cost(self._tables, self._state)

    def best(self) -> QueueOrder:
        """The cheapest plan so far."""
        queues = [
            queue[1:length]
            for queue, length in zip(self._best.queue, self._best.length, strict=True)
        ]
        return QueueOrder(
            groups=np.concatenate(queues).astype(np.int32),
            starts=np.concatenate(([0], np.cumsum(self._best.length - 1))).astype(np.int32),
        )


@kernel
def anneal(tables: Tables, state: State, best: Best, chance: Chance, cooling: Cooling) -> None:
    """Try changes of the plan; write the cheapest plan, its cost and the current cost to *best*."""
    cost, best_cost = best.costs
    fall = math.log(cooling.cold / cooling.hot) / max(1, cooling.num_moves)
    temperature = cooling.hot
    for move in range(cooling.num_moves):
        if move % _PER_TEMPERATURE == 0:
            temperature = cooling.hot * math.exp(fall * move)
        change = _try_change(tables, state, chance, -temperature * math.log(1 - unit(chance)))
        if change < TOO_MUCH:
            cost += change
            if cost < best_cost - _BETTER:
                best_cost = cost
                _keep(state, best)
    best.costs[0], best.costs[1] = cost, best_cost


@inlined
def _try_change(tables: Tables, state: State, chance: Chance, allowance: float) -> float:
    kind = unit(chance)
    if kind < _RELOCATE:
        return relocate(tables, state, chance, allowance)
    if kind < _RELOCATE_BLOCK:
        return relocate_block(tables, state, chance, allowance)
    if kind < _EXCHANGE:
        return exchange(tables, state, chance, allowance)
    if kind < _EXCHANGE_BLOCKS:
        return exchange_blocks(tables, state, chance, allowance)
    return exchange_tails(tables, state, chance, allowance)


@inlined
def _keep(state: State, best: Best) -> None:
    """Copy the queues that have changed since the last copy to the cheapest plan."""
    for instance in range(len(state.length)):
        if state.changed[instance]:
            length = state.length[instance]
            best.length[instance] = length
            for place in range(1, length):
                best.queue[instance, place] = state.queue[instance, place]
            state.changed[instance] = False
