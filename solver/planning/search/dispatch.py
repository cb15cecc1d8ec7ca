"""List scheduling: the instance that is free first takes the group with the highest priority."""

import math

import numpy as np

from solver.jit import inlined, kernel
from solver.planning.problem.problem import NONE, Floats
from solver.planning.search.evaluation import last_of, setup_of
from solver.planning.search.insertion import put_last
from solver.planning.search.state import TIME, State
from solver.planning.search.tables import LATE, OVER, WORK, Indices, Tables

LOOKAHEADS = (
    (1.0, 0.3),
    (1.0, 0.1),
    (2.0, 0.3),
    (0.5, 0.6),
    (2.0, 0.1),
    (0.5, 0.3),
    (1.0, 0.6),
    (0.5, 0.1),
    (2.0, 0.6),
)
"""
Pairs of `slack_scale` and `setup_scale` for `dispatch`; the pair with the best mean result comes
first.
"""
_LOST = 4.0
"""Reduction of the logarithm of a group's priority if none of its requests can be in time."""
_FARTHEST = 1e4
"""
Largest reduction of the logarithm of a priority by slack; larger slacks give equal priorities.
"""


@kernel
def dispatch(
    tables: Tables, state: State, groups: Indices, slack_scale: float, setup_scale: float
) -> None:
    """
    Make a plan: the instance that is free first takes the group with the highest priority.

    The priority is weight over work, reduced by slack and by setup time. Slack of *slack_scale*
    times the mean work divides the priority by e, and so does a setup time of *setup_scale* times
    the mean activation time.

    Source: the ATCS rule (Lee, Bhaskaran and Pinedo 1997), computed with logarithms.
    Differs: a group in which no request can be in time comes after groups that can be in time.
    """
    left, num_left = groups.copy(), len(groups)
    importance = _importance(tables, groups)
    slack_per_s = _per_mean_work(tables, groups) / slack_scale
    setup_per_s = _per_mean_activation(tables) / setup_scale
    free_s = np.empty(len(state.length))
    for instance in range(len(free_s)):
        free_s[instance] = state.after[last_of(state, instance), TIME]
    while num_left > 0:
        instance = int(np.argmin(free_s))
        if free_s[instance] == np.inf:
            return
        device, last = tables.device[instance], last_of(state, instance)
        highest, best = -np.inf, NONE
        for n in range(num_left):
            group = left[n]
            setup_s = setup_of(tables, instance, last, group)
            if setup_s < np.inf:
                row = tables.rows[device, group]
                over_s = free_s[instance] + setup_s + row[OVER] + row[WORK] / 2
                priority = importance[device, group] - setup_s * setup_per_s
                if over_s < 0:
                    priority += max(over_s * slack_per_s[device], -_FARTHEST)
                elif over_s > row[WORK] / 2:
                    priority -= _LOST
                if priority > highest:
                    highest, best = priority, n
        if best == NONE:
            free_s[instance] = np.inf
            continue
        put_last(tables, state, left[best], instance)
        free_s[instance] = state.after[left[best], TIME]
        num_left -= 1
        left[best] = left[num_left]


@inlined
def _importance(tables: Tables, groups: Indices) -> Floats:
    """Logarithm of the cost of each group's lateness over its work, [D, I]."""
    num_devices = tables.rows.shape[0]
    importance = np.zeros((num_devices, len(tables.home)))
    for device in range(num_devices):
        for group in groups:
            row = tables.rows[device, group]
            importance[device, group] = math.log(max(row[LATE], 1e-30) / max(row[WORK], 1e-9))
    return importance


@inlined
def _per_mean_work(tables: Tables, groups: Indices) -> Floats:
    """Inverse of the mean work of a group on each kind of device, [D]."""
    inverse = np.ones(tables.rows.shape[0])
    for device in range(len(inverse)):
        work_s = 0.0
        for group in groups:
            work_s += tables.rows[device, group, WORK]
        if 0 < work_s < np.inf:
            inverse[device] = len(groups) / work_s
    return inverse


@inlined
def _per_mean_activation(tables: Tables) -> float:
    """Inverse of the mean of the possible activation times."""
    total_s, count = 0.0, 0
    for activate_s in tables.activate_s.flat:
        if activate_s < np.inf:
            total_s += activate_s
            count += 1
    return count / total_s if total_s > 0 else 1.0
