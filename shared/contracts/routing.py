"""What routers learn from instances, tell each other, and are given: soft state, all of it."""

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
    """One request's first token, as its agent saw it."""

    request_id: RequestId
    tenant: TenantId
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those that the engine found in its prefix cache."""
    prefill_s: Seconds
    """First scheduled to first token, without time preempted; 0 where the engine does not say."""
    at: UnixTime
    prefix: tuple[int, ...] = ()
    """As of the request (`QueuedRequest.prefix`)."""


class PrefillsObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefills.observed.v1"
):
    """First tokens of one instance, milliseconds after they came."""

    instance_id: InstanceId
    incarnation: str
    model: ModelName
    at: UnixTime
    prefills: tuple[Prefill, ...]


class PrefillSample(Value, frozen=True, kw_only=True, array_like=True):
    """A prefill that a router had predicted, for learning from."""

    features: tuple[float, ...]
    """Columns of `solver.prediction.prefill_features.FEATURES`, as they were when it was routed."""
    prefill_s: Seconds


class PrefillsSampled(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefills.sampled.v1"
):
    """A router's prefills of one (model, engine, device) since it last said so."""

    sender: str
    model: ModelName
    engine: str
    device: str
    at: UnixTime
    schema_version: int
    """Of the features."""
    samples: tuple[PrefillSample, ...]


class PrefillTrees(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill.trees.v1"):
    """Quantile trees for (model, engine, device). The highest version wins."""

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    trees: msgspec.Raw
    """Of `solver.prediction.quantile_trees`; refused there when they are of other features."""


class WorkTotals(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Expected prefill work of one router on one instance since the router began, in seconds.

    Each total only grows; `finished_s` never exceeds `dispatched_s`, nor that `assigned_s`.
    """

    version: int = 0
    """Rises with each change; the higher one is the later."""
    assigned_s: Seconds = 0.0
    dispatched_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    """With a first token, or given up."""
    given_up_s: Seconds = 0.0
    """Of these, without a first token there."""
    num_assigned: int = 0
    num_finished: int = 0


class InstanceLoad(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One instance's own word about itself."""

    seq: int = 0
    """One more with each report; the higher one is the later."""
    at: UnixTime = 0.0
    running: int = 0
    prefill_backlog_tokens: int = 0
    """Not yet computed, of what the engine has been given."""
    kv_utilization: float = 0.0


class SoftState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What routers know of instances' work; lost without harm, relearnt within seconds."""

    work: dict[str, dict[InstanceId, WorkTotals]] = msgspec.field(default_factory=dict)
    """By router."""
    loads: dict[InstanceId, InstanceLoad] = msgspec.field(default_factory=dict)


class Residual(msgspec.Struct, frozen=True, array_like=True):
    """What one request taught."""

    number: int
    """Rises with each residual of its origin."""
    bucket: tuple[int, int, int]
    pace: float
    """Logarithm of the factor by which all requests took longer than predicted at the time."""
    scores: tuple[float, ...]
    """By level: the logarithm of the realised time as a multiple of the quantile at the pace."""
    mean_s: Seconds
    """Predicted, at the pace."""
    actual_s: Seconds


class CalibrationSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One router's own latest residuals: soft state that others adopt."""

    snapshot_version: int
    model_version: str
    levels: tuple[float, ...]
    origin: str
    residuals: tuple[Residual, ...]
    """Oldest first."""


class RoutingTrust(Value, frozen=True, kw_only=True, omit_defaults=True):
    """How one router's predictions for one (engine, device) do, over its latest requests."""

    engine: str
    device: str
    version: str
    """Of the trees, or of what stands in for them."""
    trusted: bool
    """Otherwise the router falls back to first come, first served and least loaded."""
    level: float
    """Of the quantile that is watched."""
    count: int
    covered: float
    """Share of the requests within it."""
    residual_s: Seconds
    """Mean of predicted less realised; negative: optimistic."""


class RouterState(Message, frozen=True, kw_only=True, omit_defaults=True, tag="router.state.v1"):
    """What one router of one model tells the others of that model."""

    sender: str
    model: ModelName
    at: UnixTime
    work: SoftState = SoftState()
    """Its own totals, and the loads that it last heard of."""
    calibrations: tuple[CalibrationSnapshot, ...] = ()
    """Its own residuals since it last told of them; all of them now and then."""
    trusts: tuple[RoutingTrust, ...] = ()
    """For operators."""
