"""Apparent tardiness cost with setups (ATCS): a dispatching rule of the scheduling literature."""

from collections.abc import Callable
from itertools import product

import numpy as np

from solver.planning.orders.queues import Queues, dispatched
from solver.planning.problem.problem import Ints, PlanningProblem, QueueOrder

SLACK_SCALES = (0.25, 0.5, 1.0)
SETUP_SCALES = (0.1, 0.3, 1.0)
_TINY = 1e-12
_NO_HURRY = 1e6
"""Assumed slack of a group without a deadline, in slack scales."""


def atcs(
    problem: PlanningProblem, *, slack_scale: float = 0.5, setup_scale: float = 0.3
) -> QueueOrder:
    """
    The instance that is free first takes the group with the highest index.

    The index is weight / work, reduced by the slack (in units of *slack_scale* times the mean
    work) and by the swap time (in units of *setup_scale* times the mean activation).

    Source: Lee, Bhaskaran, Pinedo 1997, the ATCS rule (k1, k2).
    Differs: slack is relative to the last request's deadline; a swap also waits for the drain.
    """
    instances, groups = problem.instances, problem.groups
    fits = np.isfinite(instances.activate_s)
    swap_s = float(instances.activate_s[fits].mean()) if fits.any() else 1.0
    setup_unit_s = max(1e-9, setup_scale * swap_s)
    mean_s = groups.work_s.sum(axis=1) / max(1, problem.num_groups)
    slack_unit_s = np.maximum(1e-9, slack_scale * mean_s)
    value = np.log(np.maximum(_TINY, groups.weight)) - np.log(np.maximum(_TINY, groups.work_s))

    def choose(queues: Queues, instance: int, candidates: Ints) -> int:
        device = instances.device[instance]
        done_s = (
            queues.free_s[instance]
            + groups.work_s[device, candidates]
            + groups.tail_s[device, candidates]
        )
        due_s = groups.deadline_s[candidates] + groups.spread_s[candidates]
        index = (
            value[device, candidates]
            - np.clip((due_s - done_s) / slack_unit_s[device], 0.0, _NO_HURRY)
            - queues.setup_s(instance, candidates) / setup_unit_s
        )
        return int(candidates[np.argmax(index)])

    return dispatched(problem, choose)


def best_atcs(
    problem: PlanningProblem, cost: Callable[[PlanningProblem, QueueOrder], float]
) -> QueueOrder:
    """The cheapest plan by *cost* among nine pairs of scales; the first of equally cheap plans."""
    orders = (
        atcs(problem, slack_scale=slack, setup_scale=setup)
        for slack, setup in product(SLACK_SCALES, SETUP_SCALES)
    )
    return min(orders, key=lambda order: cost(problem, order))
