"""Capacity reserved for short deadlines: leases of instances and a share of throughput."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from solver.planning.problem.arrival_curve import arrived_since
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView, ServiceRates

MAX_SHARE, SHARE_STEP = 0.9, 0.05
"""Largest reserved share of a throughput, and the step to which shares are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedCapacityOptions:
    """Definition of express requests: interactive, with deadlines too short for planning."""

    deadline_s: Seconds = 5.0
    """A lane is express if the deadlines of its requests are at most this far away."""
    lease_s: Seconds = 10.0
    """Time for which an express model keeps its instance after an express request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneArrivals:
    """Arrivals of a lane, including requests that no longer wait."""

    model: ModelName
    least_left_s: Seconds
    """Lower edge of the lane's deadline band: least time to the deadline when a request arrives."""
    arrivals: Sequence[tuple[UnixTime, float]]
    """Cumulative arrivals of the lane, in the format of `ArrivalCurve.points`."""
    tokens: float
    """Mean number of tokens per request: the prompt and the expected answer."""


def with_reserved_capacity(
    snapshot: ClusterSnapshot, lanes: Iterable[LaneArrivals], options: ReservedCapacityOptions
) -> ClusterSnapshot:
    """
    *snapshot* with capacity reserved for interactive arrivals.

    A model with express arrivals keeps one instance on which it is active: the models that this
    instance must not activate are removed from its `activate_s`. Best effort never takes the
    instance, because first tokens would be late until the express model is active again. Work with
    a deadline takes it only if no other instance can serve this work. `reserved_share` is the share
    of throughput that express requests take, equal for all instances on which their model is
    active.
    """
    near = [lane for lane in lanes if lane.least_left_s <= options.deadline_s]
    blocked = _blocked(snapshot, _reserved(near, options, snapshot.now))
    shares = _shares(snapshot, near, options)
    return replace(
        snapshot,
        instances=tuple(
            replace(
                each,
                reserved_share=shares.get(each.active, 0.0) if each.active else 0.0,
                activate_s={
                    model: seconds
                    for model, seconds in each.activate_s.items()
                    if model not in blocked[each.instance_id]
                },
            )
            for each in snapshot.instances
        ),
    )


def _reserved(
    near: Sequence[LaneArrivals], options: ReservedCapacityOptions, now: UnixTime
) -> frozenset[ModelName]:
    """Models of the lanes *near* that had requests within the last `lease_s`."""
    return frozenset(
        lane.model
        for lane in near
        if lane.arrivals and now - lane.arrivals[-1][0] < options.lease_s
    )


def _blocked(
    snapshot: ClusterSnapshot, express: frozenset[ModelName]
) -> Mapping[InstanceId, frozenset[ModelName]]:
    """Models that each instance must not activate while it is leased to another model."""
    leases = _leases(snapshot.instances, express)
    urgent = {g.key.model for g in snapshot.groups if math.isfinite(g.oldest_deadline_at)}
    free = {
        model
        for each in snapshot.instances
        if each.instance_id not in leases
        for model in each.activate_s
    }
    return {
        each.instance_id: frozenset(
            model
            for model in each.activate_s
            if leases.get(each.instance_id, model) != model
            and (model in free or model not in urgent)
        )
        for each in snapshot.instances
    }


def _leases(
    instances: Sequence[InstanceView], express: frozenset[ModelName]
) -> dict[InstanceId, ModelName]:
    """One leased instance for each express model that is active on some instance."""
    leases: dict[ModelName, InstanceId] = {}
    for each in instances:
        if each.active in express:
            leases.setdefault(each.active, each.instance_id)
    return {instance_id: model for model, instance_id in leases.items()}


def _shares(
    snapshot: ClusterSnapshot, near: Sequence[LaneArrivals], options: ReservedCapacityOptions
) -> Mapping[ModelName, float]:
    """Share of the throughput for express requests, by model; rounded to keep plans stable."""
    demand_per_s: dict[ModelName, float] = {}
    for lane in near:
        arrived = arrived_since(lane.arrivals, snapshot.now - options.lease_s)
        rate_per_s = arrived * lane.tokens / options.lease_s
        demand_per_s[lane.model] = demand_per_s.get(lane.model, 0.0) + rate_per_s
    capacity_per_s: dict[ModelName, float] = {}
    for each in snapshot.instances:
        if each.active is not None:
            rates = snapshot.rates.get((each.device, each.active), ServiceRates())
            had_per_s = capacity_per_s.get(each.active, 0.0)
            capacity_per_s[each.active] = had_per_s + rates.token_rate_per_s
    return {
        model: min(
            MAX_SHARE,
            SHARE_STEP * round(demand_per_s.get(model, 0.0) / capacity / SHARE_STEP),
        )
        for model, capacity in capacity_per_s.items()
    }
