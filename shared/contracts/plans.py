"""Plans: virtual queues as ordered segments of one model residency each."""

from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, UnixTime, Value


class LaneQuota(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A request group as a plan sees it: so many members of a lane (QLM Def. 4.1)."""

    lane: str
    quota: int
    """Requests this instance should take; advice once the plan is a few seconds old."""
    token_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of the segment's token throughput meant for this lane."""


class Segment(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One model residency. All its lanes are served together."""

    model: ModelName
    lanes: tuple[LaneQuota, ...] = ()
    best_effort_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Running slots kept for best-effort filler even while others wait."""


class VirtualQueue(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What one instance serves, in order (QLM Def. 4.2)."""

    instance_id: InstanceId
    segments: tuple[Segment, ...] = ()


class PlanPublished(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.published.v1"
):
    """One instance's part of a plan; the last one wins, lower epochs are ignored."""

    epoch: int
    issued_at: UnixTime
    leader_id: str
    queue: VirtualQueue
    policy: str
    expected_late: float = 0.0
    """Expected weighted late requests over the whole plan, as the generator judged it."""
    solve_s: Seconds = 0.0
