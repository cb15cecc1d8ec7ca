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
    """First token of one request, reported by the request's agent."""

    request_id: RequestId
    tenant: TenantId
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine found in its prefix cache."""
    prefill_s: Seconds
    """
    Time from first scheduling to first token, without preempted time. 0 if the engine reports none.
    """
    at: UnixTime
    prefix: tuple[int, ...] = ()
    """Copy of `QueuedRequest.prefix`."""


class PrefillsObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefills.observed.v1"
):
    """Recent first tokens of one instance, published within milliseconds."""

    instance_id: InstanceId
    incarnation: str
    model: ModelName
    at: UnixTime
    prefills: tuple[Prefill, ...]


class PrefillSample(Value, frozen=True, kw_only=True, array_like=True):
    """Training sample: a prefill whose duration a router had predicted."""

    features: tuple[float, ...]
    """Columns of `solver.prediction.prefill.features.FEATURES` at the time of routing."""
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
    """Quantile trees for (model, engine, device). The highest version is valid."""

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    trees: msgspec.Raw
    """Trees in the encoding of `quantile_trees`, which refuses trees with other features."""


class WorkTotals(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Totals of a router's expected prefill work on one instance since the router started, in seconds.

    Totals never decrease; `finished_s` <= `dispatched_s` <= `assigned_s`.
    """

    version: int = 0
    """Version, increased with each change; the entry with the higher version is newer."""
    assigned_s: Seconds = 0.0
    dispatched_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    """Work of requests that had their first token or were cancelled."""
    given_up_s: Seconds = 0.0
    """Part of `finished_s` for requests without a first token on this instance."""
    num_assigned: int = 0
    num_finished: int = 0


class InstanceLoad(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Load of one instance, reported by the instance."""

    seq: int = 0
    """Sequence number, increased with each report; the report with the higher number is newer."""
    at: UnixTime = 0.0
    running: int = 0
    prefill_backlog_tokens: int = 0
    """Prompt tokens that were submitted to the engine and are not computed yet."""
    kv_utilization: float = 0.0


class SoftState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Work of instances from a router's view; if lost, it is learnt again within seconds."""

    work: dict[str, dict[InstanceId, WorkTotals]] = msgspec.field(default_factory=dict)
    """Router -> instance -> work totals."""
    loads: dict[InstanceId, InstanceLoad] = msgspec.field(default_factory=dict)


class Residual(msgspec.Struct, frozen=True, array_like=True):
    """Prediction error of one request."""

    number: int
    """Sequence number, increased with each residual of the same router."""
    bucket: tuple[int, int, int]
    pace: float
    """Logarithm of the factor by which recent requests took longer than predicted."""
    scores: tuple[float, ...]
    """
    One score per quantile level: the logarithm of actual time divided by the quantile at this pace.
    """
    mean_s: Seconds
    """Predicted mean time, adjusted by `pace`."""
    actual_s: Seconds


class CalibrationSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Latest residuals of one router, which other routers adopt."""

    snapshot_version: int
    model_version: str
    levels: tuple[float, ...]
    origin: str
    residuals: tuple[Residual, ...]
    """Residuals, oldest first."""


class RoutingTrust(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Quality of one router's predictions for one (engine, device), over its latest requests."""

    engine: str
    device: str
    version: str
    """Version of the quantile trees, or name of the predictor that replaces trees."""
    trusted: bool
    """False if the router does not use predictions: first come, first served and least loaded."""
    level: float
    """Level of the monitored quantile."""
    count: int
    covered: float
    """Share of requests whose prefill took at most the monitored quantile."""
    residual_s: Seconds
    """Mean residual, predicted minus actual; negative if predictions are too low."""


class RouterState(Message, frozen=True, kw_only=True, omit_defaults=True, tag="router.state.v1"):
    """State that one router of a model publishes to other routers of this model."""

    sender: str
    model: ModelName
    at: UnixTime
    work: SoftState = SoftState()
    """Work totals of this router, and the latest load that each instance reported to it."""
    calibrations: tuple[CalibrationSnapshot, ...] = ()
    """Residuals of this router since its last message; periodically all its residuals."""
    trusts: tuple[RoutingTrust, ...] = ()
    """Quality of predictions, for operators only."""
