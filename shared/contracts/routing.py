"""Messages that routers receive from instances, estimators and each other; all soft state."""

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
    """First token of one request, as its agent observed it."""

    request_id: RequestId
    tenant: TenantId
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine found in its prefix cache."""
    prefill_s: Seconds
    """
    Time from first scheduled to first token, without preempted time; 0 if the engine reports none.
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
    """Training sample: a prefill whose time a router had predicted."""

    features: tuple[float, ...]
    """Columns of `solver.prediction.prefill.features.FEATURES` at the time of routing."""
    prefill_s: Seconds


class PrefillsSampled(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefills.sampled.v1"
):
    """A router's prefills of one (model, engine, device) since its last such message."""

    sender: str
    model: ModelName
    engine: str
    device: str
    at: UnixTime
    schema_version: int
    """Schema version of the features."""
    samples: tuple[PrefillSample, ...]


class PrefillTrees(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill.trees.v1"):
    """Quantile trees for (model, engine, device). The highest version wins."""

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    trees: msgspec.Raw
    """Encoded trees of `quantile_trees`, which refuses trees with other features."""


class WorkTotals(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Expected prefill work of one router on one instance since the router started, in seconds.

    Totals never decrease; `finished_s` <= `dispatched_s` <= `assigned_s`.
    """

    version: int = 0
    """Increases with each change: of two versions the higher one is newer."""
    assigned_s: Seconds = 0.0
    dispatched_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    """Work of requests that had their first token or were given up."""
    given_up_s: Seconds = 0.0
    """Part of `finished_s` without a first token on this instance."""
    num_assigned: int = 0
    num_finished: int = 0


class InstanceLoad(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Load that one instance reports about itself."""

    seq: int = 0
    """Sequence number that rises with each report: of two reports the higher one is newer."""
    at: UnixTime = 0.0
    running: int = 0
    prefill_backlog_tokens: int = 0
    """Prompt tokens submitted to the engine and not yet computed."""
    kv_utilization: float = 0.0


class SoftState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Routers' knowledge of instances' work; harmless to lose, learnt again within seconds."""

    work: dict[str, dict[InstanceId, WorkTotals]] = msgspec.field(default_factory=dict)
    """Router -> instance -> work totals."""
    loads: dict[InstanceId, InstanceLoad] = msgspec.field(default_factory=dict)


class Residual(msgspec.Struct, frozen=True, array_like=True):
    """Prediction error of one request."""

    number: int
    """Sequence number, rising with each residual of the router that made it."""
    bucket: tuple[int, int, int]
    pace: float
    """Logarithm of the factor by which all requests took longer than predicted at the time."""
    scores: tuple[float, ...]
    """
    One score per quantile level: logarithm of the actual time divided by the pace-adjusted
    quantile.
    """
    mean_s: Seconds
    """Predicted mean time, adjusted by the pace."""
    actual_s: Seconds


class CalibrationSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One router's own latest residuals: soft state that other routers adopt."""

    snapshot_version: int
    model_version: str
    levels: tuple[float, ...]
    origin: str
    residuals: tuple[Residual, ...]
    """Oldest first."""


class RoutingTrust(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Quality of one router's predictions for one (engine, device), over its latest requests."""

    engine: str
    device: str
    version: str
    """Version of the quantile trees, or name of the predictor used instead of trees."""
    trusted: bool
    """If false, the router falls back to first come, first served and least loaded."""
    level: float
    """Level of the monitored quantile."""
    count: int
    covered: float
    """Share of the requests whose prefill took at most the monitored quantile."""
    residual_s: Seconds
    """Mean of predicted minus actual; negative: optimistic."""


class RouterState(Message, frozen=True, kw_only=True, omit_defaults=True, tag="router.state.v1"):
    """State that one router of a model publishes to the model's other routers."""

    sender: str
    model: ModelName
    at: UnixTime
    work: SoftState = SoftState()
    """Work totals of this router, and the latest load it received from each instance."""
    calibrations: tuple[CalibrationSnapshot, ...] = ()
    """Residuals of this router since its last message; from time to time all residuals."""
    trusts: tuple[RoutingTrust, ...] = ()
    """For display to operators."""
