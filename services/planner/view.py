"""From the leader's soft state to the snapshot that a plan is made from."""

import contextlib
import math

from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import InstanceId, ModelName, UnixTime
from shared.contracts.errors import ContractError
from shared.contracts.lanes import LaneKey, LaneLayout, WorkClass, model_of
from shared.contracts.qos import Importance
from shared.contracts.telemetry import InstanceStatus, Residency
from solver.planning.lanes import band_lower_edge_s
from solver.planning.snapshot import ClusterSnapshot, GroupView, InstanceView

PRIOR_TOKENS = 256.0
"""Tokens of a request in a lane of which nothing is known."""


def cluster_snapshot(
    state: LeaderState, *, layout: LaneLayout, settings: LeaderSettings, now: UnixTime
) -> ClusterSnapshot:
    """What waits and who serves, as far as the leader knows."""
    groups = _waiting_by_lane(state, layout)
    return ClusterSnapshot(
        now=now,
        groups=tuple(
            GroupView(
                key=key,
                waiting=waiting,
                deadline_at=_deadline_at(state, layout, key, waiting, now),
                tokens_per_request=_tokens_per_request(state, key.queue_name),
            )
            for key, waiting in sorted(groups.items())
        ),
        instances=tuple(
            _instance(state, settings, status, now)
            for _, status in sorted(state.instances.items())
            if not status.draining
        ),
        express=_express(state, layout, settings, now),
    )


def lane_of(queue: str) -> LaneKey | None:
    """The lane that *queue* is or overflows; None for other queues, whatever their names say."""
    with contextlib.suppress(ContractError):
        return LaneKey.parse(queue)
    return None


def _waiting_by_lane(state: LeaderState, layout: LaneLayout) -> dict[LaneKey, int]:
    groups: dict[LaneKey, int] = {}
    for queue, ready in state.waiting.items():
        if ready == 0:
            continue
        key = lane_of(queue)
        if key is None and queue.startswith(("resume.", "relegated.")):
            key = _companion_lane(queue, layout)
        if key is not None:
            groups[key] = groups.get(key, 0) + ready
    return groups


def _companion_lane(queue: str, layout: LaneLayout) -> LaneKey:
    """The lane that stands for a companion without one of its own."""
    kind, *parts = queue.split(".")
    resumed = kind == "resume"
    return LaneKey(
        # A lane of an older layout drains as it is.
        layout=int(parts[0]) if resumed else layout.version,
        model=model_of(queue) or ModelName(""),
        importance=Importance.LOW.value,
        band=int(parts[-1]) if resumed else layout.best_effort_band,
        work=WorkClass.SHORT.value,
    )


def _deadline_at(
    state: LeaderState, layout: LaneLayout, key: LaneKey, waiting: int, now: UnixTime
) -> UnixTime:
    """
    Earliest deadline in a lane: when its head came, plus its band's lower edge.

    The head of a FIFO came no earlier than the last request that was pulled from it.
    """
    if key.band == layout.best_effort_band:
        return math.inf
    lane = key.queue_name
    marks = sorted(
        at
        for observed in state.lanes.values()
        for total in observed.lanes
        if total.lane == lane
        for at in total.recent_enqueued_at
    )
    if waiting <= len(marks):
        head_at = marks[len(marks) - waiting]
    else:
        pulled = [
            status.pulled_to[lane]
            for status in state.instances.values()
            if lane in status.pulled_to
        ]
        head_at = max(pulled, default=marks[0] if marks else now)
    return head_at + band_lower_edge_s(key.band, layout)


def _tokens_per_request(state: LeaderState, lane: str) -> float:
    requests = tokens = 0
    for observed in state.lanes.values():
        for total in observed.lanes:
            if total.lane == lane:
                requests += total.requests
                tokens += total.prompt_tokens + total.max_tokens
    return tokens / requests if requests else PRIOR_TOKENS


def _express(
    state: LeaderState, layout: LaneLayout, settings: LeaderSettings, now: UnixTime
) -> frozenset[ModelName]:
    """Models that requests with short deadlines have asked for lately."""
    express: set[ModelName] = set()
    for observed in state.lanes.values():
        for total in observed.lanes:
            key = lane_of(total.lane)
            if (
                key is not None
                and band_lower_edge_s(key.band, layout) <= settings.express_deadline_s
                and total.recent_enqueued_at
                and now - max(total.recent_enqueued_at) < settings.express_lease_s
            ):
                express.add(key.model)
    return frozenset(express)


def _instance(
    state: LeaderState, settings: LeaderSettings, status: InstanceStatus, now: UnixTime
) -> InstanceView:
    model, since = state.model_since[status.instance_id]
    # A model that has just come stays for a while, or two bursts would chase each other.
    lock_s = max(0.0, settings.min_residency_s - (now - since)) if model else 0.0
    return InstanceView(
        instance_id=InstanceId(status.instance_id),
        active=status.model,
        activate_s={
            entry.model: 0.0 if entry.residency is Residency.ACTIVE else entry.activate_s + lock_s
            for entry in status.models
        },
        token_rate_per_s=_rates(state, status),
        backlog_s=status.backlog_s,
    )


def _rates(state: LeaderState, status: InstanceStatus) -> dict[ModelName, float]:
    return {
        ModelName(model): profile.token_rate_per_s
        for (model, engine, device), profile in state.profiles.items()
        if (engine, device) == (status.engine, status.device)
        and profile.token_rate_per_s is not None
    }
