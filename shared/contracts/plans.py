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


class LaneForecast(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What the plan in force expects for a request that comes to a lane now."""

    lane: str
    wait_s: Seconds | None = None
    """Until its turn, the mean; none while nobody serves the lane."""
    wait_sd_s: Seconds | None = None
    """Its standard deviation; none when there is no wait, or the leader is too old to tell."""
    late_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of the last group that waits there."""
    request_s: Seconds = 0.0
    """By so much each further request makes the wait of the next one longer."""
    tail_s: Seconds = 0.0
    """From its turn to what its target is about, its first token or its end: the mean."""
    tail_sd_s: Seconds = 0.0
    """The standard deviation of that."""


class LanesForecast(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="lanes.forecast.v1"
):
    """Forecasts of lanes that something has come to; the last one that is heard counts."""

    epoch: int
    at: UnixTime
    age_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """Lanes were counted so long before; what has come to them since is not in it."""
    lanes: tuple[LaneForecast, ...] = ()
    groupers: Annotated[int, Meta(ge=1)] = 1
    """So many take in requests, about as many each."""


class PlanAsked(Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.asked.v1"):
    """Asks the leader to explain the plan in force."""

    reply_to: str
    """Where the answer goes, on `headway.replies`."""
    others: Annotated[int, Meta(ge=0, le=64)] = 0
    """Of so many groups, the likeliest late first, other places are told."""


class OtherPlace(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Where else a group could stand."""

    instance_id: InstanceId
    position: int
    extra_cost: float
    """Of the plan, as a share of all weight being late; negative is better."""
    wait_s: Seconds


class PlacedGroup(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One request group in the plan in force."""

    lane: str
    number: int
    """Of the group in its lane, over time."""
    num_requests: int
    instance_id: InstanceId | None = None
    """None while nobody may serve it."""
    position: int = 0
    wait_s: Seconds | None = None
    """Until its turn, the mean."""
    wait_sd_s: Seconds | None = None
    """Its standard deviation, where it is known."""
    time_left_s: Seconds | None = None
    """To the oldest request's deadline; none is best effort."""
    late_probability: float = 0.0
    others: tuple[OtherPlace, ...] = ()


class PlannedLso(Value, frozen=True, kw_only=True, omit_defaults=True):
    """An LLM serving operation that is foreseen, or several alike that follow one another."""

    lso: str
    """Its kind."""
    subject: str = ""
    """The model, or the lanes whose requests it is about, or what else it is told."""
    requests: int = 0
    """About so many: one typical request of each lane stands for all of it."""
    reason: str
    predicted_s: Seconds | None = None
    """Of all of them; none when nobody can tell."""
    figures: dict[str, float] = {}
    """Behind the reason, by name; of the first of them. `recompute_s` and `transfer_s` are what
    evicting and swapping out cost."""


class QueueHead(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance, as it is now, does to follow its virtual queue."""

    instance_id: InstanceId
    active: ModelName | None = None
    model: ModelName | None = None
    """Of the head; none when the queue is empty."""
    lsos: tuple[PlannedLso, ...] = ()
    """In order; none when there is nothing to change."""

    @property
    def swaps_model(self) -> bool:
        return self.model is not None and self.model != self.active


class AdvisedInstances(Value, frozen=True, kw_only=True, omit_defaults=True):
    """How many instances of one kind of device the load needs, were no other added."""

    device: str
    present: int
    advised: int
    """In all; `present` while those are enough, or when no number would be."""
    bound: int | None = None
    """So many further ones no plan can do without; none when no number is enough."""
    attainment: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Expected weighted share in time with the last number that was planned for."""


class ForetoldWaits(Value, frozen=True, kw_only=True, omit_defaults=True):
    """How forecasts of lanes came true lately."""

    count: int
    mean_ratio: float
    """Actual waits over what plans had: above 1, those are too short."""
    coverage: Annotated[float, Meta(ge=0, le=1)]
    """Share of waits in their 90 % interval, as it was told."""
    raw_coverage: Annotated[float, Meta(ge=0, le=1)]
    """The same, before corrections."""


class PlanExplained(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.explained.v1"
):
    """The plan in force, group by group; those likeliest to be late come first."""

    epoch: int
    at: UnixTime
    leader_id: str
    policy: str
    cause: str | None = None
    """Why the plan was made anew when it last was."""
    late_share: float = 0.0
    groups: tuple[PlacedGroup, ...] = ()
    heads: tuple[QueueHead, ...] = ()
    """Of all instances with a queue."""
    work_version: int = 0
    """Of the edges between work classes in force; 0 for the operator's."""
    instances: tuple[str, ...] = ()
    """All that may have an inbox: those that are heard, and lost ones until theirs is deleted."""
    advice: tuple[AdvisedInstances, ...] = ()
    """On scale; of when it was last asked for, `leader.advise_period_s` ago at most."""
    waits: ForetoldWaits | None = None
    """None before a turn that was foretold has come."""
