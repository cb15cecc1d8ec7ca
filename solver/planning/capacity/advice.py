"""Scaling advice: how many instances of each kind of device the waiting work needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shared.contracts.base import Seconds
from solver.planning.problem.objective import plan_cost
from solver.planning.problem.problem import Objective, PlanningProblem, QueueOrder
from solver.planning.problem.snapshot import ClusterSnapshot, planning_problem

_OBJECTIVE = Objective()
_NO_FLOORS: Mapping[str, int] = {}


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
    busy_share: float = 0.7
    """
    Share of the throughput of instances up to which they are enough for the arriving work, 0..1.
    """
    period_s: Seconds = 30.0
    """Time between two numbers, which delays a cold start."""
    down_after_s: Seconds = 600.0
    """Time for which fewer instances must have been enough before fewer are advised."""


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
    enough: int | None = None
    """
    Least number of the present instances whose plan meets the target, if the present ones do; none
    if fewer were not tried.
    """

    @property
    def instances(self) -> int:
        """
        Total number of instances for the waiting work; the current number if added instances would
        not help, or if fewer were not tried.

        If no plan met the target, the total is the current number plus the lower bound: more
        instances may not help, since one instance serves a whole group.
        """
        if self.enough is not None:
            return self.enough
        if self.confirmed is not None:
            return self.present + self.confirmed
        return self.present + min(self.most, self.bound or 0)


def scale_advice(
    snapshot: ClusterSnapshot,
    *,
    importance_weight: Mapping[str, float],
    options: AdviceOptions,
    floors: Mapping[str, int] = _NO_FLOORS,
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
        options: Target, and properties of an added instance.
        floors: Device -> least number of its instances to try; fewer instances of other devices are
            not tried.
        clock: CPU or wall time; only differences count.

    Raises:
        RuntimeError: The solver neither solved the linear program nor proved it infeasible.

    Source: QLM appendix A.3.
    """
    # OR-Tools and the kernels are loaded only where advice is computed.
    from solver.planning.capacity.fluid import SpareInstance  # noqa: PLC0415
    from solver.planning.capacity.scale_up import scale_up  # noqa: PLC0415
    from solver.planning.generator import generate  # noqa: PLC0415

    def arrays(of: ClusterSnapshot) -> PlanningProblem:
        return planning_problem(of, importance_weight=importance_weight, objective=objective)

    def plan(of: PlanningProblem) -> QueueOrder:
        return generate(of, budget_s=options.budget_s, clock=clock, seed=seed).order

    def serves(of: ClusterSnapshot) -> bool:
        smaller = arrays(of)
        return 1 - plan_cost(smaller, plan(smaller)).late_share >= options.target

    problem = arrays(snapshot)

    advice = []
    for device in sorted({each.device for each in snapshot.instances}):
        mine = [n for n, each in enumerate(snapshot.instances) if each.device == device]
        spare = SpareInstance(
            device=int(problem.instances.device[_freest(snapshot, mine)]),
            activate_s=_dearest(problem, mine),
            available_s=options.start_s,
        )
        found = scale_up(problem, spare, plan, target=options.target, most=options.most)
        enough = floors.get(device) if found.confirmed == 0 else None
        if enough is not None and snapshot.groups:
            enough = _least_kept(snapshot, mine, serves, floor=max(1, enough), most=options.most)
        advice.append(
            DeviceAdvice(
                device=device,
                present=len(mine),
                bound=found.bound,
                confirmed=found.confirmed,
                attainment=found.attainment,
                most=options.most,
                enough=enough,
            )
        )
    return tuple(advice)


def _least_kept(
    snapshot: ClusterSnapshot,
    mine: list[int],
    serves: Callable[[ClusterSnapshot], bool],
    *,
    floor: int,
    most: int,
) -> int:
    """
    Least number of the instances *mine* that serve the waiting work in time.

    The instances that are free last are kept, since it is not known which ones will end.

    Args:
        snapshot: Its present instances serve the work in time.
        mine: Instances of one kind.
        serves: Returns whether a plan for a snapshot meets the target.
        floor: Least number to try.
        most: Largest number of tries.
    """
    busiest = sorted(mine, key=lambda number: -snapshot.instances[number].backlog_s.mean)
    for count in range(floor, min(len(mine), floor + most)):
        gone = set(busiest[count:])
        left = tuple(each for n, each in enumerate(snapshot.instances) if n not in gone)
        if serves(replace(snapshot, instances=left)):
            return count
    return len(mine)


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
