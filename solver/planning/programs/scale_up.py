"""How many further instances a load needs: planning tells, from a linear program's bound on."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from solver.planning.objective import plan_cost
from solver.planning.problem import NONE, PlanningProblem, QueueOrder
from solver.planning.programs.fluid import SpareInstance, least_added

TOLERANCE = 0.01
"""Share of work that may be late where the bound is taken; a few hopeless requests are no load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpAdvice:
    """How many instances to add."""

    bound: int | None
    """Fewer are too few for any plan, by mean times; `None` when no number is enough."""
    confirmed: int | None
    """The least number, from the bound on, whose plan met the target; `None` when none did."""
    attainment: float | None
    """Expected with the last number that was planned for, 0..1; `None` when none was."""


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
    How many instances like *spare* to add, so that *target* is attained.

    Args:
        problem: What the present instances have to do.
        spare: What each further instance is.
        plan: The plan generator; asked once for each number that is tried.
        target: Expected weighted share of requests in time, 0..1.
        most: Numbers above it are not planned for.
        tolerance: Share of work that may be late where the bound is taken, 0..1.

    Source: QLM appendix A.3: scale up when no plan meets the SLOs.
    Differs: the paper does not say by how much.
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
    """The same problem with *count* instances like *spare* behind the others."""
    had = problem.instances
    return replace(
        problem,
        instances=replace(
            had,
            device=np.append(had.device, np.full(count, spare.device, dtype=np.int32)),
            active=np.append(had.active, np.full(count, NONE, dtype=np.int32)),
            activate_s=np.vstack([had.activate_s, np.tile(spare.activate_s, (count, 1))]),
            available_s=np.append(had.available_s, np.full(count, spare.available_s)),
            available_var=np.append(had.available_var, np.zeros(count)),
            drain_s=np.append(had.drain_s, np.zeros(count)),
        ),
    )
