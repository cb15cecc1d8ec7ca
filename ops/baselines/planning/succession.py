"""Setup times of an instance between consecutive groups, by mean times."""

from dataclasses import replace

import numpy as np

from solver.planning.problem.problem import Floats, PlanningProblem


def setup_s(problem: PlanningProblem, instance: int) -> Floats:
    """
    Time that *instance* drains and activates before a group, by the group before it.

    Returns:
        float64[I + 1, I]: row i is after group i, the last row at the head of the queue; infinite
        where *instance* may not serve the group.
    """
    groups, instances = problem.groups, problem.instances
    device = instances.device[instance]
    before = np.append(groups.model, instances.active[instance])
    drain_s = np.append(groups.drain_s[device], instances.drain_s[instance])
    activate_s = instances.activate_s[instance, groups.model]
    change_s = drain_s[:, np.newaxis] + activate_s
    stays = before[:, np.newaxis] == groups.model
    return np.where(np.isfinite(activate_s), np.where(stays, 0.0, change_s), np.inf)


def certain(problem: PlanningProblem) -> PlanningProblem:
    """The same problem with deterministic mean times: a request is late or it is not."""
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
