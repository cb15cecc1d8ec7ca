"""Plans: virtual queues of segments, each of which is one model residency."""

from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, UnixTime, Value


class LaneQuota(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Request group of a plan: a number of requests of one lane (QLM Def. 4.1)."""

    lane: str
    quota: int
    """Number of requests that this instance should take from the lane; valid for a few seconds."""


class Segment(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One residency of a model in a plan; all lanes of the segment are served concurrently."""

    model: ModelName
    lanes: tuple[LaneQuota, ...] = ()


class VirtualQueue(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Segments that one instance serves in order (QLM Def. 4.2)."""

    instance_id: InstanceId
    segments: tuple[Segment, ...] = ()


class PlanPublished(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.published.v1"
):
    """
    One instance's part of a plan. The last plan is valid; a plan with a lower epoch is ignored.
    """

    epoch: int
    issued_at: UnixTime
    leader_id: str
    queue: VirtualQueue
    policy: str
    expected_late: float = 0.0
    """Weighted share of the waiting requests that are expected to be late, in the whole plan."""
    solve_s: Seconds = 0.0
    work_queues: tuple[str, ...] = ()
    """Lanes and companion queues that exist, of all models that the instance can serve."""


class LaneForecast(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Forecast for a request that enters a lane now, under the current plan."""

    lane: str
    wait_s: Seconds | None = None
    """
    Mean time until a request that enters the lane is served; None while no instance serves the
    lane.
    """
    wait_sd_s: Seconds | None = None
    """
    Standard deviation of the time whose mean is `wait_s`; None without a forecast of the wait, or
    from older leaders.
    """
    late_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Probability that the last waiting group of the lane is late."""
    request_s: Seconds = 0.0
    """Additional waiting time for each further request in the lane."""
    tail_s: Seconds = 0.0
    """
    Mean time from the start of a request's service to its first token or completion, whichever the
    target limits.
    """
    tail_sd_s: Seconds = 0.0
    """Standard deviation of the time whose mean is `tail_s`."""


class LanesForecast(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="lanes.forecast.v1"
):
    """Forecasts of lanes that have received requests. Each message replaces the previous one."""

    epoch: int
    at: UnixTime
    age_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """Age of the lane counts from which the forecasts were made; later requests are not counted."""
    lanes: tuple[LaneForecast, ...] = ()
    groupers: Annotated[int, Meta(ge=1)] = 1
    """Number of groupers that admit requests; each admits about the same share."""


class PlanRequested(Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.asked.v1"):
    """Request to the leader to explain the plan in force."""

    reply_to: str
    """Routing key of the leader's answer on `headway.replies`."""
    others: Annotated[int, Meta(ge=0, le=64)] = 0
    """
    Number of groups whose alternative places the answer lists; groups that are most likely late
    come first.
    """


class OtherPlace(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Alternative place in the plan for a request group."""

    instance_id: InstanceId
    position: int
    extra_cost: float
    """
    Cost that the alternative place adds to the plan, as a fraction of the cost if all requests are
    late; negative if the place is cheaper.
    """
    wait_s: Seconds


class PlacedGroup(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One request group in the plan in force."""

    lane: str
    number: int
    """Sequence number of the request group within its lane."""
    num_requests: int
    instance_id: InstanceId | None = None
    """Instance that serves the request group; None while no instance can serve the group."""
    position: int = 0
    wait_s: Seconds | None = None
    """Mean time until the request group is served."""
    wait_sd_s: Seconds | None = None
    """
    Standard deviation of the time until the request group is served, in seconds; None if unknown.
    """
    time_left_s: Seconds | None = None
    """Time to the deadline of the request group's oldest request; None for best effort."""
    late_probability: float = 0.0
    others: tuple[OtherPlace, ...] = ()


class PlannedLso(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One predicted LLM serving operation, or several successive operations of one kind."""

    lso: str
    """Kind of the LLM serving operation."""
    subject: str = ""
    """Subject of the operation: a model, the affected requests' lanes, or another argument."""
    requests: int = 0
    """
    Approximate number of requests of the operation, since one typical request represents each lane.
    """
    reason: str
    predicted_s: Seconds | None = None
    """Predicted total duration of the operation; None if it cannot be predicted."""
    figures: dict[str, float] = {}
    """
    Values by name from which the first operation was selected. `recompute_s` is the cost of
    evicting, `transfer_s` the cost of swapping out.
    """


class QueueHead(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Operations that an instance in its current state executes to follow its virtual queue."""

    instance_id: InstanceId
    active: ModelName | None = None
    model: ModelName | None = None
    """Model of the first segment of the virtual queue; None if the virtual queue is empty."""
    lsos: tuple[PlannedLso, ...] = ()
    """LLM serving operations in order of execution; empty if nothing changes."""

    @property
    def swaps_model(self) -> bool:
        return self.model is not None and self.model != self.active


class AdvisedInstances(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Number of instances of one device type that the load needs, without changes to other types.
    """

    device: str
    present: int
    advised: int
    """
    Advised total number of instances: more than `present` if these do not suffice, fewer if fewer
    have sufficed for some time; 0 if nothing has to run.
    """
    bound: int | None = None
    """
    Lower bound on the number of additional instances for any plan; None if no number suffices.
    """
    attainment: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Expected weighted share of requests in time with the last evaluated number of instances."""


class WaitAccuracy(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Accuracy of recent lane forecasts."""

    count: int
    mean_ratio: float
    """
    Actual waiting times divided by planned waiting times; above 1 if plans are too optimistic.
    """
    coverage: Annotated[float, Meta(ge=0, le=1)]
    """Share of actual waiting times within their published 90 % intervals."""
    raw_coverage: Annotated[float, Meta(ge=0, le=1)]
    """Share of actual waiting times within their 90 % intervals before the correction."""


class PlanExplained(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="plan.explained.v1"
):
    """The current plan, group by group; the groups that are most likely late come first."""

    epoch: int
    at: UnixTime
    leader_id: str
    policy: str
    cause: str | None = None
    """Cause of the last replan."""
    late_share: float = 0.0
    groups: tuple[PlacedGroup, ...] = ()
    heads: tuple[QueueHead, ...] = ()
    """First segment of each virtual queue, with the LLM serving operations that it needs."""
    instances: tuple[str, ...] = ()
    """
    All instances that may have an inbox: live instances, and lost ones whose inboxes still exist.
    """
    advice: tuple[AdvisedInstances, ...] = ()
    """Advice on scale from the last computation, at most `leader.advise_period_s` ago."""
    waits: WaitAccuracy | None = None
    """Accuracy of lane forecasts; None until the first forecast wait has ended."""
    work_queues: tuple[str, ...] = ()
    """Lanes and companion queues that exist; empty from leaders of older versions."""
