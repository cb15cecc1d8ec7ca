"""Capacity reserved for short deadlines: a price of leaving, and a share of throughput."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from solver.planning.problem.arrival_curve import arrived_since
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView, ServiceRates

MAX_SHARE, SHARE_STEP = 0.9, 0.05
"""Largest reserved share of a throughput, and the step to which shares are rounded."""
_NEVER: Mapping[ModelName, Seconds] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedCapacityOptions:
    """Definition of express requests: interactive, with deadlines too short for planning."""

    deadline_s: Seconds = 5.0
    """A lane is express if the deadlines of its requests are at most this far away."""
    lease_s: Seconds = 10.0
    """Time after an express request for which its model is expected to get more of them."""
    longest_wait_s: Seconds = 600.0
    """
    Longest time for which work without a deadline waits for an instance with an express model.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneArrivals:
    """Arrivals of a lane, including requests that no longer wait."""

    model: ModelName
    importance: str
    least_left_s: Seconds
    """Lower edge of the lane's deadline band: least time to the deadline when a request arrives."""
    arrivals: Sequence[tuple[UnixTime, float]]
    """Cumulative arrivals of the lane, in the format of `ArrivalCurve.points`."""
    tokens: float
    """Mean number of tokens per request: the prompt and the expected answer."""


def with_reserved_capacity(
    snapshot: ClusterSnapshot,
    lanes: Iterable[LaneArrivals],
    options: ReservedCapacityOptions,
    *,
    unserved_s: Mapping[ModelName, Seconds] = _NEVER,
) -> ClusterSnapshot:
    """
    *snapshot* with capacity reserved for interactive arrivals.

    One instance on which a model with express arrivals is active has a price: each swap there costs
    the express requests that are expected to arrive until the model is back
    (`InstanceView.express_per_s`). Work with a deadline pays the price, or is served elsewhere.
    Work without a deadline pays with its waiting: it may be served there after a share of
    `longest_wait_s`, namely the probability of an express arrival during the swap there and back.
    Until then its model is withheld from the instance. `reserved_share` is the share of throughput
    that express requests take, equal for all instances on which their model is active.

    Args:
        unserved_s: Model -> longest time for which requests have waited in one of its queues and
            none has left this queue.
    """
    near = [lane for lane in lanes if lane.least_left_s <= options.deadline_s]
    rates = _express_rates(near, options, snapshot.now)
    leases = _leases(snapshot.instances, rates)
    shares = _shares(snapshot, near, options)
    patient = _patient(snapshot)

    def reserved(each: InstanceView) -> InstanceView:
        of_active = rates[each.active] if each.instance_id in leases and each.active else {}
        kept_s = {
            model: options.longest_wait_s * _chance_of_arrival(each, model, of_active)
            for model in each.activate_s
        }
        return replace(
            each,
            reserved_share=shares.get(each.active, 0.0) if each.active else 0.0,
            express_per_s=of_active,
            withheld=each.withheld
            | frozenset(
                model
                for model in patient & each.activate_s.keys()
                if unserved_s.get(model, 0.0) < kept_s[model]
            ),
        )

    return replace(snapshot, instances=tuple(reserved(each) for each in snapshot.instances))


def _express_rates(
    near: Sequence[LaneArrivals], options: ReservedCapacityOptions, now: UnixTime
) -> dict[ModelName, dict[str, float]]:
    """Model -> importance -> express arrivals per second, for models that had one recently."""
    rates: dict[ModelName, dict[str, float]] = {}
    for lane in near:
        arrived = arrived_since(lane.arrivals, now - options.lease_s)
        if arrived > 0:
            of_model = rates.setdefault(lane.model, {})
            had_per_s = of_model.get(lane.importance, 0.0)
            of_model[lane.importance] = had_per_s + arrived / options.lease_s
    return rates


def _leases(
    instances: Sequence[InstanceView], express: Container[ModelName]
) -> frozenset[InstanceId]:
    """One instance for each express model that is active on some instance."""
    leases: dict[ModelName, InstanceId] = {}
    for each in instances:
        if each.active is not None and each.active in express:
            leases.setdefault(each.active, each.instance_id)
    return frozenset(leases.values())


def _patient(snapshot: ClusterSnapshot) -> frozenset[ModelName]:
    """Models of the snapshot for which no request with a deadline waits."""
    urgent = {g.key.model for g in snapshot.groups if math.isfinite(g.oldest_deadline_at)}
    return frozenset({model for each in snapshot.instances for model in each.activate_s} - urgent)


def _chance_of_arrival(
    instance: InstanceView, model: ModelName, express_per_s: Mapping[str, float]
) -> float:
    """Probability of an express arrival while *model* replaces the active one, there and back."""
    active = instance.active
    if active is None or model == active:
        return 0.0
    away_s = instance.activate_s[model] + instance.activate_s.get(active, 0.0)
    return -math.expm1(-sum(express_per_s.values()) * away_s)


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
