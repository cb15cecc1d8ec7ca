"""Messages of the estimator: versioned profiles, which their receivers evaluate locally."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, UnixTime, Value

Coefficient = Annotated[float, Meta(ge=0)]
"""Coefficient of a latency model; not negative, since more work never takes less time."""


class LatencyCoefficients(Value, frozen=True, kw_only=True):
    """
    Time of one iteration that computes P tokens over C tokens of context (ConServe §4.2).

    duration_s = constant_s + linear_s·P + attention_s·P² + cross_s·P·C + context_s·C

    In a batch, the third and fourth term use P·C + P²/2, the sum of n·(before + n/2) over its
    prefills: n tokens are computed after *before* earlier tokens. Decodes only read their context.

    Differs: there is no separate communication term, since at fixed tensor parallelism it cannot be
    distinguished from the other terms.
    """

    constant_s: Coefficient
    linear_s: Coefficient
    attention_s: Coefficient = 0.0
    cross_s: Coefficient = 0.0
    context_s: Coefficient = 0.0


class Moments(Value, frozen=True, kw_only=True):
    """Mean, standard deviation and sample count of a quantity."""

    mean: float
    sd: float
    count: int


class Calibration(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Recent predictions compared with outcomes; each prediction was made before its outcome."""

    count: int
    bias: float
    """Mean prediction error, predicted minus actual; negative if predictions are too low."""
    spread: float
    """Standard deviation of the prediction errors."""
    at: UnixTime
    """Time of the latest outcome that was compared with its prediction."""
    coverage: tuple[tuple[float, float], ...] = ()
    """
    Pairs (level, share of outcomes up to the predicted quantile), in order of levels; empty while
    there are few outcomes.
    """


class OutputTokens(Moments, frozen=True, kw_only=True, omit_defaults=True):
    """Lengths of answers without an output limit."""

    quantiles: tuple[tuple[float, float], ...] = ()
    """
    Pairs (level, answer length in tokens at this quantile level), both rising; empty from older
    estimators.
    """
    calibration: Calibration | None = None
    """
    Prediction errors of the answer length in tokens; the prediction is the mean, capped to the
    request's limit.
    """


class TreesInForce(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Quality of the quantile trees that routers use, measured on held-out samples."""

    version: int
    at: UnixTime
    """Time at which the quantile trees were fitted."""
    samples: int
    """Number of training samples of the quantile trees."""
    coverage: tuple[tuple[float, float], ...] = ()
    """Pairs (level, share of held-out samples up to the predicted quantile), in order of levels."""


class Profile(Message, frozen=True, kw_only=True, omit_defaults=True, tag="profile.published.v1"):
    """Profile of a (model, engine, device). The profile with the highest version is valid."""

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    latency: LatencyCoefficients | None = None
    latency_error: float | None = None
    """
    Median absolute relative error of the latency model; each prediction preceded its iteration.
    """
    latency_error_p95: float | None = None
    """95th percentile of the absolute relative errors of the latency model."""
    latency_bias: float | None = None
    """
    Median relative error of the latency model, with sign; negative if predicted times are too
    short.
    """
    num_iterations: int = 0
    token_rate_per_s: float | None = None
    """Throughput of one busy instance: prompt and output tokens per second (QLM Theta)."""
    prefill_s: Moments | None = None
    """Time from a request's submission to the engine to its first token."""
    latency_calibration: Calibration | None = None
    """Calibration of the published latency models; residuals are fractions of the actual time."""
    wait_calibration: Calibration | None = None
    """Calibration of the waits predicted when requests were grouped; residuals in seconds."""
    output_tokens: dict[str, OutputTokens] = {}
    """
    Application -> output tokens, most recently seen application last; `*` stands for all
    applications.
    """
    cached_share: dict[str, float] = {}
    """Application -> share of its prompt tokens that prefix caches had, where it is above 0."""
    swap_s: dict[str, Seconds] = {}
    """Residency of the model before an activation -> duration of the activation."""
    kv_capacity_tokens: int | None = None
    """KV capacity of one instance in tokens, derived from device memory; only in profile files."""
    prefill_trees: TreesInForce | None = None
    """Summary of the trees that are published as `shared.contracts.routing.PrefillTrees`."""


class AlarmKind(Enum):
    """Kind of an alarm."""

    SLO_AT_RISK = "slo_at_risk"
    """
    A lane's deadlines are at risk.

    The estimator does not use this kind: it receives no lane states, and the leader predicts late
    lanes itself.
    """
    INSTANCE_SLOW = "instance_slow"
    """An instance is slower than its peers at the same work."""


class AlarmRaised(Message, frozen=True, kw_only=True, omit_defaults=True, tag="alarm.raised.v1"):
    """Alarm: the leader should replan before its next period."""

    alarm: AlarmKind
    lane: str | None = None
    instance_id: InstanceId | None = None
    at: UnixTime
    detail: str = ""
