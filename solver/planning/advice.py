"""Advice on scale: how many instances of each kind of device the present load needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from solver.planning.building import ClusterSnapshot, planning_problem
from solver.planning.problem import Objective, PlanningProblem, QueueOrder

_OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """What is wanted, and what a further instance would be."""

    target: float = 0.99
    """Expected weighted share of requests in time, 0..1."""
    most: int = 8
    """Further instances that are planned for at most."""
    start_s: Seconds = 60.0
    """Until a further instance can activate its first model."""
    budget_s: Seconds = 0.1
    """Of the generator, for each number that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAdvice:
    """How many instances there should be of one kind of device, were no other added."""

    device: str
    present: int
    bound: int | None
    """Fewer further ones are too few for any plan; none when no number is enough."""
    confirmed: int | None
    """The least number of further ones whose plan met the target; none when none did."""
    attainment: float | None
    """Expected with the last number that was planned for; none when none was."""
    most: int

    @property
    def instances(self) -> int:
        """
        To have in all: no more when none would help.

        When no plan met the target it is what no plan can do without, as far as that was looked
        for: more may not help, since a group is served by one instance.
        """
        if self.confirmed is not None:
            return self.present + self.confirmed
        return self.present + min(self.most, self.bound or 0)


def scale_advice(
    snapshot: ClusterSnapshot,
    *,
    tier_weight: Mapping[str, float],
    options: AdviceOptions,
    clock: Callable[[], Seconds],
    seed: int,
    objective: Objective = _OBJECTIVE,
) -> tuple[DeviceAdvice, ...]:
    """
    Advice for each kind of device in *snapshot*, by name.

    A further instance has the models that its kind has, none of them active, and activates each
    at the highest price that one of its kind pays.

    Args:
        snapshot: With at least one instance.
        tier_weight: What one late request costs, by importance.
        options: The target, and what a further instance would be.
        clock: CPU or wall time; only differences count.
        seed: Of the search.
        objective: What a plan costs.

    Raises:
        RuntimeError: The bound's program was neither solved nor refuted.

    Source: QLM appendix A.3.
    """
    # OR-Tools and kernels are loaded only where advice is made.
    from solver.planning.generator import generate  # noqa: PLC0415
    from solver.planning.programs.fluid import SpareInstance  # noqa: PLC0415
    from solver.planning.programs.scale_up import scale_up  # noqa: PLC0415

    problem = planning_problem(snapshot, tier_weight=tier_weight, objective=objective)

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
    """The one of which express requests take least: a further instance takes some from others."""
    return min(instances, key=lambda number: snapshot.instances[number].express_share)


def _dearest(problem: PlanningProblem, instances: list[int]) -> np.ndarray:
    """float64[M]: the highest price of activating each model; infinite where none may have it."""
    activate_s = problem.instances.activate_s[instances]
    finite = np.isfinite(activate_s)
    dearest = np.where(finite, activate_s, 0.0).max(axis=0)
    return np.where(finite.any(axis=0), dearest, np.inf)
