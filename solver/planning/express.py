"""Interactive requests that come and go too fast for plans: leases and a share of throughput."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from solver.planning.arrival_curve import arrived_since
from solver.planning.building import ClusterSnapshot, InstanceView, ServiceRates

MAX_SHARE, SHARE_STEP = 0.9, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpressOptions:
    """What counts as express."""

    deadline_s: Seconds = 5.0
    """Requests with a deadline this near make their model express."""
    lease_s: Seconds = 10.0
    """An express model keeps an instance so long after such a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneArrivals:
    """What has come to a lane, whether or not it still waits."""

    model: ModelName
    least_left_s: Seconds
    """Until its requests' deadlines when they came: the lower edge of its band."""
    arrivals: Sequence[tuple[UnixTime, float]]
    """Cumulative, as of `ArrivalCurve.points`."""
    tokens: float
    """Of a request, prompt and expected answer."""


def with_express(
    snapshot: ClusterSnapshot, lanes: Iterable[LaneArrivals], options: ExpressOptions
) -> ClusterSnapshot:
    """
    *snapshot* with what interactive arrivals need kept from the rest.

    Models that an instance may not be given are taken out of its `activate_s`: a model with
    express arrivals keeps one instance that has it active. Best effort never takes that one, for
    bringing the model back would cost first tokens more than it gains; work with a deadline takes
    it only if it can be served nowhere else. What express requests take of the throughput of the
    instances that have their model, all of them alike, is their `express_share`.
    """
    near = [lane for lane in lanes if lane.least_left_s <= options.deadline_s]
    blocked = _blocked(snapshot, _express(near, options, snapshot.now))
    shares = _shares(snapshot, near, options)
    return replace(
        snapshot,
        instances=tuple(
            replace(
                each,
                express_share=shares.get(each.active, 0.0) if each.active else 0.0,
                activate_s={
                    model: seconds
                    for model, seconds in each.activate_s.items()
                    if model not in blocked[each.instance_id]
                },
            )
            for each in snapshot.instances
        ),
    )


def _express(
    near: Sequence[LaneArrivals], options: ExpressOptions, now: UnixTime
) -> frozenset[ModelName]:
    """Models that requests with short deadlines have asked for lately."""
    return frozenset(
        lane.model
        for lane in near
        if lane.arrivals and now - lane.arrivals[-1][0] < options.lease_s
    )


def _blocked(
    snapshot: ClusterSnapshot, express: frozenset[ModelName]
) -> Mapping[InstanceId, frozenset[ModelName]]:
    """Models that each instance does not get while it is leased to another."""
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
    """One instance for each express model that some instance has active."""
    leases: dict[ModelName, InstanceId] = {}
    for each in instances:
        if each.active in express:
            leases.setdefault(each.active, each.instance_id)
    return {instance_id: model for model, instance_id in leases.items()}


def _shares(
    snapshot: ClusterSnapshot, near: Sequence[LaneArrivals], options: ExpressOptions
) -> Mapping[ModelName, float]:
    """By model; in steps, so that a plan does not change with every request."""
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
