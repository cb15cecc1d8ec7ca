"""State of a plan for kernels: queues, and accumulated values at each place of a queue."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver.planning.problem.objective import late_in_any_plan, never_servable, scales_of
from solver.planning.problem.problem import NONE, Floats, PlanCost, PlanningProblem, QueueOrder
from solver.planning.search.tables import Indices, Tables

TIME, VAR, COMMON, COST, SWAPS = 0, 1, 2, 3, 4
"""
Columns of `State.after`: mean time, variance, variance of common errors, cost, and the part of the
cost that is that of swaps.
"""


class State(NamedTuple):
    """
    Mutable state of a plan during the search.

    Place 0 of a queue is the running work; groups have the places from 1 on.
    """

    queue: Indices
    """
    Index of the group at each place of each queue, [G, I + 1]; entries from `length` on are
    undefined.
    """
    length: Indices
    """Number of places of each queue, including place 0, [G]."""
    instance: Indices
    """Instance of each group, `NONE` for a group that is in no queue, [I + G]."""
    place: Indices
    """Place of each group in its queue, [I + G]."""
    after: Floats
    """
    Values accumulated up to the end of each group in its queue, columns `TIME` to `SWAPS`, [I + G,
    5].
    """
    done: Floats
    """Seconds of work of each model up to and including each group in its queue, [I + G, M]."""
    late: Floats
    """Expected late share of each group, [I + G]."""
    changed: NDArray[np.bool_]
    """True for each queue that changed since the last copy of the plan, [G]."""
    ahead: Floats
    """Scratch array: seconds of work of each model along a drafted queue, [M]."""
    draft: Indices
    """Scratch array: drafted ends of two queues, [2, I + 1]."""


def empty_state(problem: PlanningProblem) -> State:
    """State in which no group is in a queue."""
    num_groups, num_instances = problem.num_groups, problem.num_instances
    num_rows = num_groups + num_instances
    running = np.arange(num_groups, num_rows)
    queue = np.empty((num_instances, num_groups + 1), dtype=np.int64)
    queue[:, 0] = running
    instance = np.full(num_rows, NONE, dtype=np.int64)
    instance[running] = np.arange(num_instances)
    after = np.zeros((num_rows, 5))
    after[running, TIME] = problem.instances.available_s
    after[running, VAR] = problem.instances.available_var
    return State(
        queue=queue,
        length=np.ones(num_instances, dtype=np.int64),
        instance=instance,
        place=np.zeros(num_rows, dtype=np.int64),
        after=after,
        done=np.zeros((num_rows, problem.num_models)),
        late=np.zeros(num_rows),
        changed=np.zeros(num_instances, dtype=np.bool_),
        ahead=np.empty(problem.num_models),
        draft=np.empty((2, num_groups + 1), dtype=np.int64),
    )


def order_of(state: State) -> QueueOrder:
    """The plan that *state* contains."""
    queues = [queue[1:length] for queue, length in zip(state.queue, state.length, strict=True)]
    return QueueOrder(
        groups=np.concatenate(queues).astype(np.int32),
        starts=np.concatenate(([0], np.cumsum(state.length - 1))).astype(np.int32),
    )


def cost_of(problem: PlanningProblem, tables: Tables, state: State) -> PlanCost:
    """Cost of the plan in *state* as in `plan_cost`, from the values that kernels maintain."""
    groups, objective, scales = problem.groups, problem.objective, scales_of(problem)
    share = groups.weight / scales.weight
    planned = tables.served
    late = late_in_any_plan(problem)
    late[planned] = np.maximum(late[planned], state.late[planned])
    end_s = state.after[planned, TIME]
    tail_s = groups.tail_s[tables.device[state.instance[planned]], planned]
    over_s = end_s + tail_s - groups.deadline_s[planned] - groups.spread_s[planned]
    tardy = np.minimum(np.maximum(0.0, over_s) / groups.slo_s[planned], objective.max_tardiness)
    waits = end_s / scales.queue_s
    last = state.queue[np.arange(problem.num_instances), state.length - 1]
    home = tables.home[planned]
    moved = planned[(home != NONE) & (state.instance[planned] != home)]
    return PlanCost(
        late_share=float(share @ late),
        tardiness=objective.tardiness * float(share[planned] @ tardy),
        drain=float(state.after[last, SWAPS].sum()),
        moved=float(tables.move_cost[moved].sum()),
        unserved=float(share[never_servable(problem)].sum()),
        waiting=objective.waiting * float(share[planned] @ waits),
    )
