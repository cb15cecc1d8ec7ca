"""Review of the plan in force: evaluate the plan again, and replace it only for a `Cause`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from shared.contracts.base import InstanceId, ModelName, Seconds
from shared.contracts.plans import LaneForecast
from solver.planning.forecast import lane_forecasts
from solver.planning.generator import generate, kept_order
from solver.planning.problem.grouping import GroupId
from solver.planning.problem.objective import alarms, late_probability, plan_cost
from solver.planning.problem.problem import Objective, PlanCost, PlanningProblem, QueueOrder
from solver.planning.problem.snapshot import ClusterSnapshot, places, planning_problem

Clock = Callable[[], Seconds]
Pair = tuple[str, ModelName]
_BUDGET_S_PER_GROUP, _LEAST_BUDGET_S = 1e-3, 0.02
"""CPU time of the plan generator per group, and at least; small problems need less than large."""
_LEAST_REPORTED = 1e-3
"""Smallest late probability that a review reports."""
_OBJECTIVE = Objective()


class Cause(Enum):
    """Reason for making a new plan."""

    FIRST = "first"
    """There was no plan before."""
    INSTANCES = "instances"
    """An instance was added or lost, drains, or has other models than before."""
    ARRIVALS = "arrivals"
    """Some waiting groups are in no queue of the plan."""
    VIOLATIONS = "violations"
    """More work is expected to be late than when the plan was made."""
    ALARMS = "alarms"
    """Groups have become unlikely to be in time, or the instance monitor raised an alarm."""
    IDLE = "idle"
    """An instance has no work in the plan, although work waits that it could serve."""
    DRIFT = "drift"
    """Instances serve at another rate than the plan assumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewOptions:
    """Thresholds and budget of planning."""

    importance_weight: Mapping[str, float]
    budget_s: Seconds = 0.3
    """CPU time of the plan generator."""
    later_share: float = 0.01
    """Increase of the expected late share of all weight that causes a new plan."""
    drift: float = 0.2
    """Relative change of a throughput that causes a new plan."""
    confidence: float = 0.95
    """
    Least probability of being in time (QLM's Delta); a group with a lower probability raises an
    alarm.
    """
    objective: Objective = _OBJECTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Inputs that the plan in force was made from."""

    instances: frozenset[tuple[InstanceId, frozenset[ModelName]]]
    rates: Mapping[Pair, float]
    late_share: float
    idle: frozenset[tuple[InstanceId, bool]] = frozenset()
    """
    Instances without work in the plan, although work waited that they could serve, each with True
    if a swap there was free of the prices of running requests and of express arrivals. Others are a
    reason for a new plan, and those that have become free.
    """
    alarms: frozenset[GroupId] = frozenset()
    """
    Groups with an alarm when the plan was made; only alarms of other groups are a reason for a new
    plan.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The plan to follow from now on, new or kept."""

    order: QueueOrder
    cause: Cause | None
    """Reason for the new plan; none if the old plan is kept with new groups inserted."""
    cost: PlanCost
    kept_cost: PlanCost
    """Cost of the old plan, with each new group inserted at its cheapest position."""
    basis: Basis
    late_probability: Mapping[GroupId, float] = field(default_factory=dict)
    """Late probability of each group, without groups that are almost certainly in time."""
    forecasts: tuple[LaneForecast, ...] = ()
    alarms: tuple[GroupId, ...] = ()
    """
    Groups with a low probability of being in time; the groups that are most likely late come first.
    """

    def places(self, snapshot: ClusterSnapshot) -> dict[GroupId, tuple[InstanceId, int]]:
        """Instance and position of each group; the field `running` of the next snapshot."""
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
    Evaluate the plan in force, and make a better plan if there is a reason.

    Args:
        snapshot: State of the cluster, with the plan in force.
        basis: Inputs of the last plan; none before the first plan.
        clock: CPU or wall time; only differences count.
    """
    problem = planning_problem(
        snapshot, importance_weight=options.importance_weight, objective=options.objective
    )
    kept = kept_order(problem)
    kept_cost = plan_cost(problem, kept)
    alarmed = _alarms(snapshot, problem, kept, options)
    cause: Cause | None = Cause.FIRST
    if basis is not None:
        now = _basis(snapshot, kept_cost, alarmed, _idle(snapshot, problem, kept))
        cause = _cause(snapshot, basis, now, options)
    order, cost = kept, kept_cost
    if basis is None or cause is not None:
        for_size_s = max(_LEAST_BUDGET_S, _BUDGET_S_PER_GROUP * problem.num_groups)
        budget_s = min(options.budget_s, for_size_s)
        generated = generate(problem, budget_s=budget_s, clock=clock, seed=seed)
        order, cost = generated.order, generated.cost
        alarmed = _alarms(snapshot, problem, order, options)
        basis = _basis(snapshot, cost, alarmed, _idle(snapshot, problem, order))
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
    snapshot: ClusterSnapshot, made_from: Basis, now: Basis, options: ReviewOptions
) -> Cause | None:
    """
    The first reason to replace the plan in force.

    Args:
        made_from: Inputs that the plan was made from.
        now: The same inputs now, if the plan is kept.
    """
    servable = {
        model for each in snapshot.instances for model in each.activate_s.keys() - each.withheld
    }
    is_new = any(
        group.group_id not in snapshot.running
        for group in snapshot.groups
        if group.key.model in servable
    )
    is_alarmed = snapshot.alarms_raised > 0 or not made_from.alarms.issuperset(now.alarms)
    reasons = (
        (Cause.INSTANCES, made_from.instances != now.instances),
        (Cause.ARRIVALS, is_new),
        (Cause.VIOLATIONS, now.late_share > made_from.late_share + options.later_share),
        (Cause.ALARMS, is_alarmed),
        (Cause.IDLE, _has_more_idle(made_from.idle, now.idle)),
        (Cause.DRIFT, _drift(made_from.rates, now.rates) > options.drift),
    )
    return next((cause for cause, holds in reasons if holds), None)


def _has_more_idle(
    before: frozenset[tuple[InstanceId, bool]], now: frozenset[tuple[InstanceId, bool]]
) -> bool:
    """True if another instance is without work, or one of them has become free to swap."""
    known = {name for name, _ in before}
    return any(name not in known or (free and (name, True) not in before) for name, free in now)


def _idle(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder
) -> frozenset[tuple[InstanceId, bool]]:
    """
    Instances without work in *order*, although work waits that they could serve, and whether they
    are free to swap: nothing runs there, and no express arrivals are expected.
    """
    instances = problem.instances
    waiting = np.unique(problem.groups.model[order.groups])
    can_serve = np.isfinite(instances.activate_s[:, waiting]).any(axis=1)
    busy = instances.available_s + instances.drain_s + instances.express_per_s
    return frozenset(
        (snapshot.instances[g].instance_id, bool(busy[g] == 0))
        for g in np.flatnonzero((np.diff(order.starts) == 0) & can_serve)
    )


def _basis(
    snapshot: ClusterSnapshot,
    cost: PlanCost,
    alarmed: tuple[GroupId, ...],
    idle: frozenset[tuple[InstanceId, bool]],
) -> Basis:
    return Basis(
        instances=_instances(snapshot),
        rates=_rates(snapshot),
        late_share=cost.late_share,
        alarms=frozenset(alarmed),
        idle=idle,
    )


def _instances(snapshot: ClusterSnapshot) -> frozenset[tuple[InstanceId, frozenset[ModelName]]]:
    return frozenset((each.instance_id, frozenset(each.activate_s)) for each in snapshot.instances)


def _rates(snapshot: ClusterSnapshot) -> dict[tuple[str, ModelName], float]:
    return {key: rates.token_rate_per_s for key, rates in snapshot.rates.items()}


def _drift(before: Mapping[Pair, float], now: Mapping[Pair, float]) -> float:
    """Largest relative change of a value among the keys that both mappings contain."""
    return max((abs(now[key] / before[key] - 1) for key in now.keys() & before.keys()), default=0.0)


def _late(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder
) -> dict[GroupId, float]:
    probabilities = late_probability(problem, order)
    return {
        snapshot.groups[number].group_id: float(probabilities[number])
        for number in np.flatnonzero(probabilities > _LEAST_REPORTED)
    }
