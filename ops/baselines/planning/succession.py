"""Setup times (drain and activation) between consecutive groups on an instance, by mean times."""

from dataclasses import replace

import numpy as np

from solver.planning.problem.objective import prices_of, swap_costs
from solver.planning.problem.problem import NONE, Floats, PlanningProblem


def setup_s(problem: PlanningProblem, instance: int) -> Floats:
    """
    Setup time (drain and activation) of *instance* between each pair of consecutive groups.

    Returns:
        float64[I + 1, I]: [i, j] is the setup between group i and group j; the last row is for
        groups at the head of the queue. Infinite where *instance* may not serve group j.
    """
    groups, instances = problem.groups, problem.instances
    device = instances.device[instance]
    before = np.append(groups.model, instances.active[instance])
    drain_s = np.append(groups.drain_s[device], instances.drain_s[instance])
    activate_s = instances.activate_s[instance, groups.model]
    change_s = drain_s[:, np.newaxis] + activate_s
    stays = before[:, np.newaxis] == groups.model
    return np.where(np.isfinite(activate_s), np.where(stays, 0.0, change_s), np.inf)


def swap_costs_of(problem: PlanningProblem) -> list[Floats]:
    """
    Cost of the drain and the activation between each pair of consecutive groups, by instance.

    Returns:
        float64[I + 1, I] for each instance, with the rows of `setup_s`.
    """
    prices = prices_of(problem)
    after = np.arange(problem.num_groups, dtype=np.int32)
    before = np.append(after, np.int32(NONE))[:, np.newaxis]
    return [swap_costs(problem, g, before, after, prices) for g in range(problem.num_instances)]


def certain(problem: PlanningProblem) -> PlanningProblem:
    """Replace the random times of *problem* by their means."""
    groups, instances = problem.groups, problem.instances
    return replace(
        problem,
        groups=replace(
            groups,
            work_var=np.zeros_like(groups.work_var),
            tail_var=np.zeros_like(groups.tail_var),
        ),
        instances=replace(
            instances,
            available_var=np.zeros_like(instances.available_var),
            rate_error=np.zeros_like(instances.rate_error),
        ),
    )
