"""Scaling advice: how many instances of each kind of device the current load needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from solver.planning.problem.problem import Objective, PlanningProblem, QueueOrder
from solver.planning.problem.snapshot import ClusterSnapshot, planning_problem

_OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """Target of the advice, and the properties of an added instance."""

    target: float = 0.99
    """Expected weighted share of requests in time that the advice aims at, 0..1."""
    most: int = 8
    """Largest number of added instances to plan for."""
    start_s: Seconds = 60.0
    """Time until an added instance can activate its first model."""
    budget_s: Seconds = 0.1
    """CPU time of the plan generator for each number of instances that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAdvice:
    """Number of instances of one kind of device that are needed if no other kind is added."""

    device: str
    present: int
    bound: int | None
    """Lower bound of the number of added instances for any plan; none if no number is enough."""
    confirmed: int | None
    """Least number of added instances whose plan met the target; none if no plan met the target."""
    attainment: float | None
    """
    Expected weighted share of requests in time under the last plan that was made; none without a
    plan.
    """
    most: int

    @property
    def instances(self) -> int:
        """
        Recommended total number of instances; the current number if added instances would not help.

        If no plan met the target, the total is the current number plus the lower bound: more
        instances may not help, since one instance serves a whole group.
        """
        if self.confirmed is not None:
            return self.present + self.confirmed
        return self.present + min(self.most, self.bound or 0)


def scale_advice(
    snapshot: ClusterSnapshot,
    *,
    importance_weight: Mapping[str, float],
    options: AdviceOptions,
    clock: Callable[[], Seconds],
    seed: int,
    objective: Objective = _OBJECTIVE,
) -> tuple[DeviceAdvice, ...]:
    """
    Advice for each kind of device in *snapshot*, by name.

    An added instance can serve the models of its kind, and none is active at first. The added
    instance activates each model in the longest time that an existing instance of its kind needs.

    Args:
        snapshot: Has at least one instance.
        importance_weight: Cost of one late request, by importance.
        clock: CPU or wall time; only differences count.

    Raises:
        RuntimeError: The solver neither solved the linear program nor proved it infeasible.

    Source: QLM appendix A.3.
    """
    # OR-Tools and the kernels are loaded only where advice is computed.
    from solver.planning.capacity.fluid import SpareInstance  # noqa: PLC0415
    from solver.planning.capacity.scale_up import scale_up  # noqa: PLC0415
    from solver.planning.generator import generate  # noqa: PLC0415

    problem = planning_problem(snapshot, importance_weight=importance_weight, objective=objective)

    def plan(larger: PlanningProblem) -> QueueOrder:
        return generate(larger, budget_s=options.budget_s, clock=clock, seed=seed).order

    advice = []
    for device in sorted({each.device for each in snapshot.instances}):
        mine = [n for n, each in enumerate(snapshot.instances) if each.device == device]
        spare = SpareInstance(
            device=int(problem.instances.device[_freest(snapshot, mine)]),
            activate_s=_dearest(problem, mine),
            available_s=options.start_s,
        )
        found = scale_up(problem, spare, plan, target=options.target, most=options.most)
        advice.append(
            DeviceAdvice(
                device=device,
                present=len(mine),
                bound=found.bound,
                confirmed=found.confirmed,
                attainment=found.attainment,
                most=options.most,
            )
        )
    return tuple(advice)


def _freest(snapshot: ClusterSnapshot, instances: list[int]) -> int:
    """
    Instance with the smallest share of express requests; added instances are copies of this
    instance.
    """
    return min(instances, key=lambda number: snapshot.instances[number].reserved_share)


def _dearest(problem: PlanningProblem, instances: list[int]) -> np.ndarray:
    """
    Longest activation time of each model, float64[M]; infinite where no instance may have the
    model.
    """
    activate_s = problem.instances.activate_s[instances]
    finite = np.isfinite(activate_s)
    dearest = np.where(finite, activate_s, 0.0).max(axis=0)
    return np.where(finite.any(axis=0), dearest, np.inf)
