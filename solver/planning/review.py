"""When to plan again: the plan in force is judged anew, and replaced only for a reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from shared.contracts.base import InstanceId, ModelName, Seconds
from shared.contracts.plans import LaneForecast
from solver.planning.building import ClusterSnapshot, places, planning_problem
from solver.planning.forecast import lane_forecasts
from solver.planning.generator import generate, kept_order
from solver.planning.grouping import GroupId
from solver.planning.objective import alarms, late_probability, plan_cost
from solver.planning.problem import Objective, PlanCost, PlanningProblem, QueueOrder

Clock = Callable[[], Seconds]
Pair = tuple[str, ModelName]
_BUDGET_S_PER_GROUP = 1e-3
"""Small problems are solved in less than the whole budget."""
_SELDOM = 1e-3
"""Less is told of nobody."""
_OBJECTIVE = Objective()


class Cause(Enum):
    """Why a plan was made anew."""

    FIRST = "first"
    """There was none."""
    INSTANCES = "instances"
    """One came, went, drains, or has other models."""
    ARRIVALS = "arrivals"
    """Groups wait that no queue has."""
    VIOLATIONS = "violations"
    """More work is expected to be late than when the plan was made."""
    ALARMS = "alarms"
    """Groups have become unlikely to be in time, or somebody has raised an alarm."""
    DRIFT = "drift"
    """Instances serve at another pace than the plan counts on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewOptions:
    """How eagerly to plan."""

    tier_weight: Mapping[str, float]
    budget_s: Seconds = 0.3
    """CPU time of the generator."""
    later_share: float = 0.01
    """Of all weight: so much more that is expected late is a reason to plan anew."""
    drift: float = 0.2
    """Relative change of a throughput that is a reason."""
    confidence: float = 0.95
    """QLM's Delta: a group that is in time with less probability is an alarm."""
    objective: Objective = _OBJECTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the plan in force was made from."""

    instances: frozenset[tuple[InstanceId, frozenset[ModelName]]]
    rates: Mapping[Pair, float]
    late_share: float
    alarms: frozenset[GroupId] = frozenset()
    """Of the plan when it was made: it could do no better for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The plan to follow from now on, new or kept."""

    order: QueueOrder
    cause: Cause | None
    """Why it is new; none when the old one is kept, new groups put in where they cost least."""
    cost: PlanCost
    kept_cost: PlanCost
    """Of the old one, likewise."""
    basis: Basis
    late_probability: Mapping[GroupId, float] = field(default_factory=dict)
    """Of groups that may be late; the others are left out."""
    forecasts: tuple[LaneForecast, ...] = ()
    alarms: tuple[GroupId, ...] = ()
    """Groups whose chance to be in time is too small, the likeliest to be late first."""

    def places(self, snapshot: ClusterSnapshot) -> dict[GroupId, tuple[InstanceId, int]]:
        """What the next snapshot calls `running`."""
        return places(snapshot, self.order)


def review(
    snapshot: ClusterSnapshot,
    basis: Basis | None,
    *,
    options: ReviewOptions,
    clock: Clock,
    seed: int,
) -> Review:
    """
    Judge the plan in force and make a better one if there is a reason.

    Args:
        snapshot: The world, with the plan in force.
        basis: Of the last plan; none at first.
        options: How eagerly.
        clock: CPU or wall time; only differences count.
        seed: Of the search.

    Source: QLM §4: the plan generator runs when the estimator expects violations.
    """
    problem = planning_problem(
        snapshot, tier_weight=options.tier_weight, objective=options.objective
    )
    kept = kept_order(problem)
    kept_cost = plan_cost(problem, kept)
    alarmed = _alarms(snapshot, problem, kept, options)
    cause = Cause.FIRST if basis is None else _cause(snapshot, basis, kept_cost, alarmed, options)
    order, cost = kept, kept_cost
    if basis is None or cause is not None:
        budget_s = min(options.budget_s, _BUDGET_S_PER_GROUP * problem.num_groups)
        generated = generate(problem, budget_s=budget_s, clock=clock, seed=seed)
        order, cost = generated.order, generated.cost
        alarmed = _alarms(snapshot, problem, order, options)
        basis = _basis(snapshot, cost, alarmed)
    return Review(
        order=order,
        cause=cause,
        cost=cost,
        kept_cost=kept_cost,
        basis=basis,
        late_probability=_late(snapshot, problem, order),
        forecasts=lane_forecasts(snapshot, problem, order),
        alarms=alarmed,
    )


def _alarms(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder, options: ReviewOptions
) -> tuple[GroupId, ...]:
    return tuple(
        snapshot.groups[number].group_id
        for number in alarms(problem, order, confidence=options.confidence)
    )


def _cause(
    snapshot: ClusterSnapshot,
    basis: Basis,
    kept: PlanCost,
    alarmed: tuple[GroupId, ...],
    options: ReviewOptions,
) -> Cause | None:
    if basis.instances != _instances(snapshot):
        return Cause.INSTANCES
    if any(group.group_id not in snapshot.running for group in snapshot.groups):
        return Cause.ARRIVALS
    if kept.late_share > basis.late_share + options.later_share:
        return Cause.VIOLATIONS
    if snapshot.alarms_raised or not basis.alarms.issuperset(alarmed):
        return Cause.ALARMS
    if _drift(basis.rates, _rates(snapshot)) > options.drift:
        return Cause.DRIFT
    return None


def _basis(snapshot: ClusterSnapshot, cost: PlanCost, alarmed: tuple[GroupId, ...]) -> Basis:
    return Basis(
        instances=_instances(snapshot),
        rates=_rates(snapshot),
        late_share=cost.late_share,
        alarms=frozenset(alarmed),
    )


def _instances(snapshot: ClusterSnapshot) -> frozenset[tuple[InstanceId, frozenset[ModelName]]]:
    return frozenset((each.instance_id, frozenset(each.activate_s)) for each in snapshot.instances)


def _rates(snapshot: ClusterSnapshot) -> dict[tuple[str, ModelName], float]:
    return {key: rates.token_rate_per_s for key, rates in snapshot.rates.items()}


def _drift(before: Mapping[Pair, float], now: Mapping[Pair, float]) -> float:
    """Largest relative change of what both know."""
    return max((abs(now[key] / before[key] - 1) for key in now.keys() & before.keys()), default=0.0)


def _late(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder
) -> dict[GroupId, float]:
    probabilities = late_probability(problem, order)
    return {
        snapshot.groups[number].group_id: float(probabilities[number])
        for number in np.flatnonzero(probabilities > _SELDOM)
    }
