"""Soft state that routers receive from instances, estimators and other routers."""

import msgspec

from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    Seconds,
    TenantId,
    UnixTime,
    Value,
)


class Prefill(Value, frozen=True, kw_only=True, array_like=True):
    """The first token of one request, reported by the agent that runs the request."""

    request_id: RequestId
    tenant: TenantId
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that the engine found in its prefix cache."""
    prefill_s: Seconds
    """
    Time from the request's first scheduling to its first token, without preempted time. 0 if the
    engine reports none.
    """
    at: UnixTime
    prefix: tuple[int, ...] = ()
    """Copy of the request's field `QueuedRequest.prefix`."""


class PrefillsObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefills.observed.v1"
):
    """First tokens of recent requests on one instance, published within milliseconds."""

    instance_id: InstanceId
    incarnation: str
    model: ModelName
    at: UnixTime
    prefills: tuple[Prefill, ...]


class PrefillSample(Value, frozen=True, kw_only=True, array_like=True):
    """Training sample: a prefill whose duration a router had predicted."""

    features: tuple[float, ...]
    """
    Features of the prefill at routing, in the order of
    `solver.prediction.prefill.features.FEATURES`.
    """
    prefill_s: Seconds


class PrefillsSampled(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefills.sampled.v1"
):
    """Prefills of one (model, engine, device) since the router's last message of this kind."""

    sender: str
    model: ModelName
    engine: str
    device: str
    at: UnixTime
    schema_version: int
    """Schema version of the features."""
    samples: tuple[PrefillSample, ...]


class PrefillTrees(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill.trees.v1"):
    """
    Quantile trees for a (model, engine, device). The trees with the highest version are valid.
    """

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    trees: msgspec.Raw
    """
    Trees in the encoding of `quantile_trees`, whose decoder refuses trees with other features.
    """


class WorkTotals(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Totals of a router's expected prefill work on one instance since the router started, in seconds.

    Totals never decrease; `finished_s` <= `dispatched_s` <= `assigned_s`.
    """

    version: int = 0
    """
    Version of the totals, increased with each change; an entry with a higher version is newer.
    """
    assigned_s: Seconds = 0.0
    dispatched_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    """Prefill work, in seconds, of requests that had their first token or were cancelled."""
    given_up_s: Seconds = 0.0
    """Part of `finished_s` for requests without a first token on this instance."""
    num_assigned: int = 0
    num_finished: int = 0


class InstanceLoad(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Load of one instance, reported by its agent."""

    seq: int = 0
    """
    Sequence number of the report, increased with each report; a report with a higher number is
    newer.
    """
    at: UnixTime = 0.0
    running: int = 0
    prefill_backlog_tokens: int = 0
    """Number of prompt tokens that were submitted to the engine and are not computed yet."""
    kv_utilization: float = 0.0


class SoftState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Prefill work of instances from a router's view; a lost message is replaced within seconds."""

    work: dict[str, dict[InstanceId, WorkTotals]] = msgspec.field(default_factory=dict)
    """Router -> instance -> totals of expected prefill work."""
    loads: dict[InstanceId, InstanceLoad] = msgspec.field(default_factory=dict)


class Residual(msgspec.Struct, frozen=True, array_like=True):
    """Prediction error of one request's prefill time."""

    number: int
    """Sequence number of the residual, increased with each residual of the same router."""
    bucket: tuple[int, int, int]
    pace: float
    """Logarithm of the factor by which recent requests took longer than predicted."""
    scores: tuple[float, ...]
    """
    Score per quantile level: logarithm of the actual time divided by the predicted quantile,
    adjusted by `pace`.
    """
    mean_s: Seconds
    """Predicted mean prefill time, adjusted by `pace`."""
    actual_s: Seconds


class CalibrationSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Latest residuals of one router, which other routers adopt."""

    snapshot_version: int
    model_version: str
    levels: tuple[float, ...]
    origin: str
    residuals: tuple[Residual, ...]
    """Prediction errors of the router, oldest first."""


class RoutingTrust(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Quality of one router's predictions for one (engine, device), over its latest requests."""

    engine: str
    device: str
    version: str
    """Version of the quantile trees, or name of the predictor that is used instead of trees."""
    trusted: bool
    """
    False if the router ignores predictions: requests go first come, first served to the least
    loaded instance.
    """
    level: float
    """Level of the quantile whose coverage is monitored."""
    count: int
    covered: float
    """Share of requests whose prefill took no longer than the monitored quantile."""
    residual_s: Seconds
    """Mean prediction error, predicted minus actual; negative if predictions are too low."""


class RouterState(Message, frozen=True, kw_only=True, omit_defaults=True, tag="router.state.v1"):
    """State that one router of a model publishes to other routers of this model."""

    sender: str
    model: ModelName
    at: UnixTime
    work: SoftState = SoftState()
    """Work totals of this router, and the latest load that each instance reported to it."""
    calibrations: tuple[CalibrationSnapshot, ...] = ()
    """
    Prediction errors of this router since its last message; periodically all its prediction errors.
    """
    trusts: tuple[RoutingTrust, ...] = ()
    """Quality of this router's predictions per engine and device; only shown to operators."""
