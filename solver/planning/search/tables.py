"""Constants of a planning problem in arrays for kernels: one row per device and group."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver.planning.problem.objective import (
    activation_costs,
    homes,
    prices_of,
    scales_of,
    servable,
)
from solver.planning.problem.problem import Floats, PlanningProblem
from solver.planning.search.normal import normal_table

Indices = NDArray[np.int64]
"""Type of index arrays; all kernels use one integer width, so that each kernel is compiled once."""

WORK, WORK_VAR, DRAIN = 0, 1, 2
LATE = 3
"""Column of the cost of a group all of whose requests are late."""
OVER, TARDY, MOST_TARDY = 4, 5, 6
"""
Columns of a group's tardiness.

The columns are: lateness of the last request if the group ends at 0, cost per second of lateness,
and maximum of the cost.
"""
WAITING = 7
"""Column of the cost per second until the end of a group."""
LEAST_OVER, MOST_OVER, MOST_VAR = 8, 9, 10
"""
Columns of the extremes over all milestones of a group: least lateness, most lateness, largest
variance.
"""
MILESTONES = 11
"""
First column of the milestones. Each milestone has three columns: lateness of its request if the
group starts at 0, variance of the lateness without the common error, and seconds of work before it.
"""
PER_MILESTONE = 3


class Tables(NamedTuple):
    """
    Constants of a planning problem for kernels.

    The running work of instance g counts as a group without work with index I + g.
    """

    rows: Floats
    """
    Constants of each group on each kind of device: a row per device and group, columns `WORK` to
    `MILESTONES`. Costs are normalised.
    """
    model: Indices
    """Model of each group, or `NONE`, [I + G]."""
    home: Indices
    """Instance whose current queue has each group, as in `homes`, [I]."""
    device: Indices
    """Kind of device of each instance, [G]."""
    activate_s: Floats
    """Activation time of each model on each instance, [G, M]."""
    error_var: Floats
    """Squared relative error of the throughput of each model on each kind of device, [D, M]."""
    second_cost: float
    """Cost of one second of a drain."""
    activation_cost: Floats
    """
    Cost of activating a model while another one is active, as `activation_costs`, [G, M + 1, M].
    """
    move_cost: Floats
    """Cost of moving each group to another instance, as `Prices.move`, [I]."""
    served: Indices
    """Groups that some instance may serve, sorted by model."""
    first_served: Indices
    """Index into `served` at which the groups of each model begin, [M + 1]."""
    normal: Floats


def tables_of(problem: PlanningProblem) -> Tables:
    """Compute the constants of a planning problem for kernels, which takes a few milliseconds."""
    instances, model, prices = problem.instances, problem.groups.model, prices_of(problem)
    served = np.flatnonzero(servable(problem))
    served = served[np.argsort(model[served], kind="stable")]
    return Tables(
        rows=_rows(problem),
        model=np.concatenate((model, instances.active)).astype(np.int64),
        home=homes(problem).astype(np.int64),
        device=instances.device.astype(np.int64),
        activate_s=np.ascontiguousarray(instances.activate_s, dtype=np.float64),
        error_var=np.ascontiguousarray(instances.rate_error**2, dtype=np.float64),
        second_cost=prices.second,
        activation_cost=np.stack(
            [activation_costs(problem, g, prices) for g in range(problem.num_instances)]
        ),
        move_cost=prices.move,
        served=served.astype(np.int64),
        first_served=np.searchsorted(model[served], np.arange(problem.num_models + 1)).astype(
            np.int64
        ),
        normal=normal_table(),
    )


def _rows(problem: PlanningProblem) -> Floats:
    groups, objective = problem.groups, problem.objective
    scales = scales_of(problem)
    share = groups.weight / scales.weight
    progress = np.array(objective.milestones)
    num_devices, num_groups = groups.work_s.shape
    num_rows = num_groups + problem.num_instances
    rows = np.zeros((num_devices, num_rows, MILESTONES + PER_MILESTONE * len(progress)))
    rows[:, num_groups:, DRAIN] = problem.instances.drain_s
    known = rows[:, :num_groups]
    known[..., WORK], known[..., WORK_VAR] = groups.work_s, groups.work_var
    known[..., DRAIN] = groups.drain_s
    known[..., LATE] = share
    known[..., OVER] = groups.tail_s - groups.deadline_s - groups.spread_s
    known[..., TARDY] = objective.tardiness * share / groups.slo_s
    known[..., MOST_TARDY] = objective.tardiness * objective.max_tardiness * share
    known[..., WAITING] = objective.waiting * share / scales.queue_s
    done_s = groups.work_s[..., np.newaxis] * progress
    limit_s = groups.deadline_s[:, np.newaxis] + groups.spread_s[:, np.newaxis] * progress
    over_s = done_s + groups.tail_s[..., np.newaxis] - limit_s
    var = groups.work_var[..., np.newaxis] * progress + groups.tail_var[..., np.newaxis]
    known[..., LEAST_OVER], known[..., MOST_OVER] = over_s.min(axis=2), over_s.max(axis=2)
    known[..., MOST_VAR] = var.max(axis=2)
    for column, values in enumerate((over_s, var, done_s)):
        known[..., MILESTONES + column :: PER_MILESTONE] = values
    return rows
