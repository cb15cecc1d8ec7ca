"""Converts the leader's state to the snapshot from which a plan is made."""

import contextlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from services.planner.leader.rates import (
    PRIOR_OUTPUT,
    PRIOR_PROMPT,
    PRIOR_RATE_PER_S,
    Rates,
    batch_of,
    device_of,
    output_tokens,
    rates_of,
)
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.errors import ContractError
from shared.contracts.lanes import LaneKey, LaneLayout, model_of
from shared.contracts.qos import Importance
from shared.contracts.telemetry import InstanceStatus, LaneTotal, Residency
from solver.planning.lanes import band_lower_edge_s
from solver.planning.problem.arrival_curve import merged
from solver.planning.problem.grouping import (
    LaneStatistics,
    RequestGroup,
    Spread,
    group_size,
    groups_of,
)
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView, ServiceRates
from solver.planning.reserved_capacity import LaneArrivals, with_reserved_capacity
from solver.planning.residency import withheld_models
from solver.prediction.calibration.lane_waits import LaneCount

RESUMED, RELEGATED = "resume.", "relegated."
"""Beginnings of the names of companion queues that several lanes share."""
_Band = tuple[ModelName, int | None]
"""Model and deadline band; None: all bands with deadlines."""
DIVIDED_LANES = 64
"""Most lanes whose work is divided into small groups; many lanes are divided among instances."""


def cluster_snapshot(
    state: LeaderState, *, layout: LaneLayout, settings: LeaderSettings, now: UnixTime
) -> ClusterSnapshot:
    """Snapshot of waiting requests and serving instances in the leader's current state."""
    statuses = [status for _, status in sorted(state.instances.items()) if not status.draining]
    lanes = _lanes(state, layout)
    rates = rates_of(state, statuses)
    able: dict[ModelName, list[InstanceStatus]] = {}
    for status in statuses:
        for entry in status.models:
            able.setdefault(ModelName(entry.model), []).append(status)
    groups = tuple(
        group
        for lane in lanes
        for group in _groups(
            lane,
            able.get(lane.key.model, []),
            rates,
            settings,
            now,
            divides=len(lanes) <= DIVIDED_LANES,
        )
    )
    waiting: dict[ModelName, bool] = {}
    for group in groups:
        has_deadline = math.isfinite(group.oldest_deadline_at)
        waiting[group.key.model] = waiting.get(group.key.model, False) or has_deadline
    snapshot = ClusterSnapshot(
        now=now,
        groups=groups,
        instances=tuple(
            _instance(status, rates, withheld=_withheld(state, settings, status, waiting, now))
            for status in statuses
        ),
        rates=rates,
        running=state.places,
        overflow=_overflow(state),
        alarms_raised=state.alarms_heard - state.alarms_planned,
    )
    return with_reserved_capacity(
        snapshot,
        lane_arrivals(state, layout),
        settings.express,
        unserved_s=_unserved_s(state),
    )


def _unserved_s(state: LeaderState) -> dict[ModelName, Seconds]:
    """Model -> longest time for which none of the requests in one of its queues was served."""
    longest: dict[ModelName, Seconds] = {}
    for queue, unserved_s in state.unserved_s.items():
        if (model := model_of(queue)) is not None:
            longest[model] = max(longest.get(model, 0.0), unserved_s)
    return longest


def lane_of(queue: str) -> LaneKey | None:
    """Lane whose main queue or overflow queue is *queue*; None for other queues."""
    with contextlib.suppress(ContractError):
        return LaneKey.parse(queue)
    return None


def _lanes(state: LeaderState, layout: LaneLayout) -> list[LaneStatistics]:
    """Statistics of waiting requests by lane, including those in the lane's companion queues."""
    totals = _totals(state)
    waiting, relegated = _waiting_by_lane(state, layout, _importances(totals, layout))
    return [
        replace(
            _statistics(state, layout, key, number, totals.get(key.queue_name, ())),
            relegated=relegated.get(key, 0),
        )
        for key, number in sorted(waiting.items())
    ]


def lane_counts(state: LeaderState) -> dict[str, LaneCount]:
    """Arrivals of each reported lane, and waiting requests in its main queue and overflow queue."""
    found, pulled = {}, _pulled_s(state)
    for name, totals in _totals(state).items():
        key = lane_of(name)
        if key is not None:
            overflow = state.waiting.get(key.overflow_name, 0)
            waiting = state.waiting.get(key.queue_name, 0) + overflow
            arrived = sum(total.requests - total.routed for total in totals)
            found[name] = LaneCount(arrived, waiting, pulled.get(key.model, 0.0), overflow)
    return found


def _overflow(state: LeaderState) -> dict[str, int]:
    """
    Number of requests in the overflow queue of each lane; lanes without overflow are left out.
    """
    keys = {queue: lane_of(queue) for queue, ready in state.waiting.items() if ready}
    return {
        key.queue_name: state.waiting[queue]
        for queue, key in keys.items()
        if key is not None and queue == key.overflow_name
    }


def _pulled_s(state: LeaderState) -> dict[ModelName, Seconds]:
    """Model -> mean seconds of work that each of its instances has pulled and not begun."""
    pulled: dict[ModelName, list[Seconds]] = {}
    for status in state.instances.values():
        if status.model is not None:
            pulled.setdefault(status.model, []).append(_backlog_s(status))
    return {model: fmean(each) for model, each in pulled.items()}


def _backlog_s(status: InstanceStatus) -> Seconds:
    """
    Predicted backlog of an instance.

    If the instance reports no `pull`, the result is an upper bound: all answers have maximum
    length.
    """
    pull = status.pull
    if pull is None:
        return status.backlog_s
    return pull.backlog_s if pull.whole_backlog_s is None else pull.whole_backlog_s


def empty_lanes(
    state: LeaderState, layout: LaneLayout, now: UnixTime, *, but: Container[str]
) -> list[RequestGroup]:
    """
    A typical request that arrives now, for each lane that has had arrivals and is not in *but*.
    """
    typical = (
        replace(_statistics(state, layout, key, 1, totals), arrivals=())
        for name, totals in sorted(_totals(state).items())
        if name not in but and (key := lane_of(name)) is not None
    )
    return [group for lane in typical for group in groups_of(lane, size=1, now=now)]


def _totals(state: LeaderState) -> Mapping[str, list[LaneTotal]]:
    totals: dict[str, list[LaneTotal]] = {}
    for observed in state.lanes.values():
        for total in observed.lanes:
            totals.setdefault(total.lane, []).append(total)
    return totals


def _waiting_by_lane(
    state: LeaderState, layout: LaneLayout, importances: Mapping[_Band, str]
) -> tuple[dict[LaneKey, int], dict[LaneKey, int]]:
    """Number of waiting requests by lane, and number of those among them that were relegated."""
    waiting: dict[LaneKey, int] = {}
    relegated: dict[LaneKey, int] = {}
    for queue, ready in state.waiting.items():
        if ready == 0:
            continue
        key = lane_of(queue)
        if key is None and queue.startswith((RESUMED, RELEGATED)):
            key = _companion_lane(queue, layout, importances)
        if key is not None:
            waiting[key] = waiting.get(key, 0) + ready
            if queue.startswith(RELEGATED):
                relegated[key] = relegated.get(key, 0) + ready
    return waiting, relegated


def _importances(totals: Mapping[str, list[LaneTotal]], layout: LaneLayout) -> dict[_Band, str]:
    """
    Importance of most requests that arrived, by model and band; also of all requests with targets
    of a model, with band None.
    """
    arrived: dict[_Band, dict[str, int]] = {}
    for name, of_lane in totals.items():
        key = lane_of(name)
        if key is None:
            continue
        bands = (key.band, None) if key.band < layout.best_effort_band else (key.band,)
        for band in bands:
            of_band = arrived.setdefault((key.model, band), {})
            had = of_band.get(key.importance, 0)
            of_band[key.importance] = had + sum(total.requests for total in of_lane)
    return {band: max(counts, key=counts.__getitem__) for band, counts in arrived.items()}


def _companion_lane(queue: str, layout: LaneLayout, importances: Mapping[_Band, str]) -> LaneKey:
    """
    Lane that represents a companion queue which several lanes share, with the importance of most
    requests of these lanes.
    """
    kind, *parts = queue.split(".")
    resumed = kind == "resume"
    model = model_of(queue) or ModelName("")
    band = int(parts[-1]) if resumed else layout.best_effort_band
    return LaneKey(
        # A resume queue keeps the layout that its name states until it is drained.
        layout=int(parts[0]) if resumed else layout.version,
        model=model,
        importance=importances.get((model, band if resumed else None), Importance.LOW.value),
        band=band,
        work="w0",
    )


def _statistics(
    state: LeaderState,
    layout: LaneLayout,
    key: LaneKey,
    waiting: int,
    totals: list[LaneTotal] | tuple[()],
) -> LaneStatistics:
    num = sum(total.requests for total in totals)
    best_effort = key.band == layout.best_effort_band
    if num == 0:
        return LaneStatistics(
            key=key,
            waiting=waiting,
            time_left_s=band_lower_edge_s(key.band, layout),
            prompt_tokens=PRIOR_PROMPT,
            output_tokens=PRIOR_OUTPUT,
        )
    prompt = sum(total.prompt_tokens for total in totals) / num
    squares = sum(total.squared_prompt_tokens for total in totals) / num
    return LaneStatistics(
        key=key,
        waiting=waiting,
        arrivals=merged(total.arrivals for total in totals),
        time_left_s=math.inf
        if best_effort
        else max(
            band_lower_edge_s(key.band, layout), sum(total.time_left_s for total in totals) / num
        ),
        interactive=2 * sum(total.interactive for total in totals) > num,
        prompt_tokens=Spread(prompt, math.sqrt(max(0.0, squares - prompt**2))),
        output_tokens=output_tokens(state, key.model, sum(t.expected_tokens for t in totals) / num),
    )


def _groups(
    lane: LaneStatistics,
    able: Sequence[InstanceStatus],
    rates: Rates,
    settings: LeaderSettings,
    now: UnixTime,
    *,
    divides: bool,
) -> list[RequestGroup]:
    """Request groups of a lane, which the *able* instances may serve, and maybe share."""
    tokens = max(1.0, lane.prompt_tokens.mean + lane.output_tokens.mean)
    size = group_size(
        lane,
        average_batch=max((batch_of(status, tokens) for status in able), default=1.0),
        token_rate_per_s=max(
            (rates[device_of(status), lane.key.model].token_rate_per_s for status in able),
            default=PRIOR_RATE_PER_S,
        ),
        activate_s=_activate_s(lane.key.model, able) if divides else math.inf,
        batch_multiple=settings.group_batch_multiple,
    )
    return groups_of(lane, size=size, now=now)


def _activate_s(model: ModelName, able: Sequence[InstanceStatus]) -> Seconds:
    """Shortest time to activate *model* on an instance where it is not active; infinite if none."""
    return min(
        (
            entry.activate_s
            for status in able
            for entry in status.models
            if entry.model == model and entry.residency is not Residency.ACTIVE
        ),
        default=math.inf,
    )


def _instance(
    status: InstanceStatus, rates: Rates, *, withheld: frozenset[ModelName]
) -> InstanceView:
    # A swap that has begun is not planned again: its model counts as active.
    model = status.next_model
    others_s = [
        entry.activate_s for entry in status.models if entry.residency is not Residency.ACTIVE
    ]
    # Reactivating the active model costs time only if another model was active in between.
    back_s = sum(others_s) / len(others_s) if others_s else 0.0
    swap_s = sum(entry.activate_s for entry in status.models if entry.model == status.activating)
    active = ServiceRates()
    if model:
        active = rates.get((device_of(status), model), active)
    return InstanceView(
        instance_id=InstanceId(status.instance_id),
        device=device_of(status),
        active=model,
        activate_s={
            entry.model: back_s if entry.residency is Residency.ACTIVE else entry.activate_s
            for entry in status.models
        },
        backlog_s=Spread(_backlog_s(status) + swap_s),
        withheld=withheld,
        drain_s=_drain_s(status, active),
    )


def _drain_s(status: InstanceStatus, active: ServiceRates) -> Seconds:
    """
    Time until the running requests end: of staggered requests, the last one ends after twice the
    mean time. Without predictions of the agent, each has a typical answer left.
    """
    if not status.running:
        return 0.0
    left_s = [
        lane.remaining_s / lane.requests
        for lane in (status.lso.running if status.lso else ())
        if lane.remaining_s is not None and lane.requests
    ]
    typical_s = active.decode_s_per_token * PRIOR_OUTPUT.mean
    return 2 * max(left_s) if left_s else typical_s


def _withheld(
    state: LeaderState,
    settings: LeaderSettings,
    status: InstanceStatus,
    waiting: Mapping[ModelName, bool],
    now: UnixTime,
) -> frozenset[ModelName]:
    """Models that the instance may not activate yet, by `solver.planning.residency`."""
    active, since = state.model_since[status.instance_id]
    others_s = {
        ModelName(entry.model): entry.activate_s for entry in status.models if entry.model != active
    }
    return withheld_models(
        None if active is None else ModelName(active),
        others_s,
        waiting,
        active_for_s=now - since,
        swaps=settings.min_residency_swaps,
    )


def lane_arrivals(state: LeaderState, layout: LaneLayout) -> Iterator[LaneArrivals]:
    """Reported arrivals by lane; a lane occurs once for each grouper that fills it."""
    for observed in state.lanes.values():
        for total in observed.lanes:
            key = lane_of(total.lane)
            if key is None or not total.requests:
                continue
            answer = output_tokens(state, key.model, total.expected_tokens / total.requests).mean
            yield LaneArrivals(
                model=key.model,
                importance=key.importance,
                least_left_s=band_lower_edge_s(key.band, layout),
                arrivals=total.arrivals,
                tokens=total.prompt_tokens / total.requests + answer,
            )
