"""Plans: virtual queues as ordered segments of one model residency each."""

from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, UnixTime, Value


class LaneQuota(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A request group as a plan sees it: a number of requests of one lane (QLM Def. 4.1)."""

    lane: str
    quota: int
    """Requests this instance should take; advisory once the plan is a few seconds old."""
    token_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the segment's token throughput meant for this lane."""


class Segment(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One model residency. All its lanes are served concurrently."""

    model: ModelName
    lanes: tuple[LaneQuota, ...] = ()
    best_effort_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of running slots reserved for best-effort work even while other requests wait."""


class VirtualQueue(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Ordered segments that one instance serves (QLM Def. 4.2)."""

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
    """
    Expected weighted number of late requests over the whole plan, as its generator computed it.
    """
    solve_s: Seconds = 0.0
    work_queues: tuple[str, ...] = ()
    """Lanes and companion queues that exist, of all models that the instance can serve."""


class LaneForecast(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Forecast of the current plan for a request that enters a lane now."""

    lane: str
    wait_s: Seconds | None = None
    """Mean time until the turn of the request; None while no instance serves the lane."""
    wait_sd_s: Seconds | None = None
    """Standard deviation of the wait; None without a wait or from leaders of older versions."""
    late_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Probability that the last waiting group of the lane is late."""
    request_s: Seconds = 0.0
    """Additional wait per further request in the lane."""
    tail_s: Seconds = 0.0
    """
    Mean time from the turn of a request to the event that its target limits: first token or
    completion.
    """
    tail_sd_s: Seconds = 0.0
    """Standard deviation of `tail_s`."""


class LanesForecast(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="lanes.forecast.v1"
):
    """Forecasts of lanes that have received requests; the last one received wins."""

    epoch: int
    at: UnixTime
    age_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """
    Age of the counts of waiting requests in lanes; requests that arrived after the count are not
    included.
    """
    lanes: tuple[LaneForecast, ...] = ()
    groupers: Annotated[int, Meta(ge=1)] = 1
    """Number of groupers that take in requests, each about the same share."""


class PlanRequested(Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.asked.v1"):
    """Asks the leader to explain the plan in force."""

    reply_to: str
    """Routing key of the answer on `headway.replies`."""
    others: Annotated[int, Meta(ge=0, le=64)] = 0
    """
    Number of groups for which alternative places are reported, beginning with the group likeliest
    to be late.
    """


class OtherPlace(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Alternative place of a group."""

    instance_id: InstanceId
    position: int
    extra_cost: float
    """
    Cost that this place adds to the plan, as a fraction of the cost of all requests being late;
    negative: cheaper.
    """
    wait_s: Seconds


class PlacedGroup(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One request group in the plan in force."""

    lane: str
    number: int
    """Sequence number of the group within its lane."""
    num_requests: int
    instance_id: InstanceId | None = None
    """None while no instance may serve it."""
    position: int = 0
    wait_s: Seconds | None = None
    """Mean time until the turn of the group."""
    wait_sd_s: Seconds | None = None
    """Standard deviation of the wait, where known."""
    time_left_s: Seconds | None = None
    """Time to the deadline of the oldest request; None for best effort."""
    late_probability: float = 0.0
    others: tuple[OtherPlace, ...] = ()


class PlannedLso(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A predicted LLM serving operation, or several consecutive ones of one kind."""

    lso: str
    """Kind of the operation."""
    subject: str = ""
    """The model, the lanes of the affected requests, or another argument of the operation."""
    requests: int = 0
    """Approximate number of requests: one typical request of each lane represents all of it."""
    reason: str
    predicted_s: Seconds | None = None
    """Total duration; None when it cannot be predicted."""
    figures: dict[str, float] = {}
    """
    Figures behind the reason, by name, for the first operation. `recompute_s` and `transfer_s` are
    the costs of evicting and swapping out.
    """


class QueueHead(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Operations that an instance performs, in its current state, to follow its virtual queue."""

    instance_id: InstanceId
    active: ModelName | None = None
    model: ModelName | None = None
    """Model of the head segment; None when the queue is empty."""
    lsos: tuple[PlannedLso, ...] = ()
    """Operations in order of execution; empty when nothing has to change."""

    @property
    def swaps_model(self) -> bool:
        return self.model is not None and self.model != self.active


class AdvisedInstances(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Number of instances of one device type that the load needs, with all other types unchanged.
    """

    device: str
    present: int
    advised: int
    """Total number of instances; equals `present` if these suffice, or if no number suffices."""
    bound: int | None = None
    """Lower bound on additional instances for any plan; None when no number is enough."""
    attainment: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Expected weighted share of requests in time, with the last number of instances evaluated."""


class WaitAccuracy(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Accuracy of recent lane forecasts."""

    count: int
    mean_ratio: float
    """Actual waits divided by planned waits: above 1, plans are too optimistic."""
    coverage: Annotated[float, Meta(ge=0, le=1)]
    """Share of actual waits within the 90 % interval published for them."""
    raw_coverage: Annotated[float, Meta(ge=0, le=1)]
    """Share of actual waits within the 90 % interval before corrections."""


class PlanExplained(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.explained.v1"
):
    """The current plan, group by group, likeliest late first."""

    epoch: int
    at: UnixTime
    leader_id: str
    policy: str
    cause: str | None = None
    """Cause of the last replan."""
    late_share: float = 0.0
    groups: tuple[PlacedGroup, ...] = ()
    heads: tuple[QueueHead, ...] = ()
    """Heads of all instances with a virtual queue."""
    instances: tuple[str, ...] = ()
    """
    All instances that may have an inbox: live ones, and lost ones until their inbox is deleted.
    """
    advice: tuple[AdvisedInstances, ...] = ()
    """Scaling advice from its last computation, at most `leader.advise_period_s` ago."""
    waits: WaitAccuracy | None = None
    """Accuracy of lane forecasts; None until the first forecast wait has ended."""
    work_queues: tuple[str, ...] = ()
    """Lanes and companion queues that exist; empty from leaders of older versions."""
