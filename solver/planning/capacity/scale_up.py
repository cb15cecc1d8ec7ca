"""
Number of instances to add for a load: one plan is made per number, from a lower bound upwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from solver.planning.capacity.fluid import SpareInstance, least_added
from solver.planning.problem.objective import plan_cost
from solver.planning.problem.problem import NONE, PlanningProblem, QueueOrder

TOLERANCE = 0.01
"""Share of work that may be late in the lower bound; a few infeasible requests do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpAdvice:
    """Advice: the number of instances to add."""

    bound: int | None
    """
    Lower bound of the number of added instances for any plan, by mean times; `None` if no number is
    enough.
    """
    confirmed: int | None
    """
    Least number of added instances, from `bound` on, whose plan met the target; `None` if no plan
    met the target.
    """
    attainment: float | None
    """
    Expected weighted share of requests in time under the last plan that was made, 0..1; `None`
    without a plan.
    """


def scale_up(
    problem: PlanningProblem,
    spare: SpareInstance,
    plan: Callable[[PlanningProblem], QueueOrder],
    *,
    target: float,
    most: int,
    tolerance: float = TOLERANCE,
) -> ScaleUpAdvice:
    """
    Number of instances like *spare* to add, so that *target* is attained.

    Args:
        problem: Work of the current instances.
        plan: The plan generator; called once for each number that is tried.
        target: Expected weighted share of requests in time, 0..1.
        most: Largest number to plan for.
        tolerance: Share of work that may be late in the lower bound, 0..1.

    Source: QLM appendix A.3: scale up when no plan meets the SLOs.
    Differs: the paper does not give the number of instances to add.
    """
    bound = least_added(problem, spare, tolerance=tolerance)
    attainment = None
    for count in range(most + 1 if bound is None else bound, most + 1):
        larger = with_added(problem, spare, count)
        attainment = 1 - plan_cost(larger, plan(larger)).late_share
        if attainment >= target:
            return ScaleUpAdvice(bound=bound, confirmed=count, attainment=attainment)
    return ScaleUpAdvice(bound=bound, confirmed=None, attainment=attainment)


def with_added(problem: PlanningProblem, spare: SpareInstance, count: int) -> PlanningProblem:
    """Copy of *problem* with *count* additional instances like *spare*."""
    had = problem.instances
    return replace(
        problem,
        instances=replace(
            had,
            device=np.append(had.device, np.full(count, spare.device, dtype=np.int32)),
            active=np.append(had.active, np.full(count, NONE, dtype=np.int32)),
            activate_s=np.vstack([had.activate_s, np.tile(spare.activate_s, (count, 1))]),
            withheld=np.pad(had.withheld, ((0, count), (0, 0))),
            available_s=np.append(had.available_s, np.full(count, spare.available_s)),
            available_var=np.append(had.available_var, np.zeros(count)),
            drain_s=np.append(had.drain_s, np.zeros(count)),
            express_per_s=np.append(had.express_per_s, np.zeros(count)),
        ),
    )
