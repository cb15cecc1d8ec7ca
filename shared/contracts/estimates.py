"""Messages of the estimator: versioned profiles that hot paths evaluate themselves."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, UnixTime, Value

Coefficient = Annotated[float, Meta(ge=0)]
"""Not negative: more work never takes less time."""


class LatencyCoefficients(Value, frozen=True, kw_only=True):
    """
    Time of one iteration (ConServe §4.2), for P tokens computed over C tokens of context.

    duration_s = constant_s + linear_s·P + attention_s·P² + cross_s·P·C + context_s·C

    For a batch, P·C + P²/2 in the third and fourth term is the sum over its prefills of
    n·(before + n/2), for n tokens after *before* others: decodes only read their context.

    Differs: the communication term is merged into the others, since at a fixed tensor
    parallelism it cannot be distinguished from them.
    """

    constant_s: Coefficient
    linear_s: Coefficient
    attention_s: Coefficient = 0.0
    cross_s: Coefficient = 0.0
    context_s: Coefficient = 0.0


class Moments(Value, frozen=True, kw_only=True):
    """Mean, standard deviation and sample count."""

    mean: float
    sd: float
    count: int


class Calibration(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Recent predictions compared with outcomes; each prediction preceded its outcome."""

    count: int
    bias: float
    """Mean of the residuals, predicted minus actual; negative: optimistic."""
    spread: float
    """Standard deviation of the residuals."""
    at: UnixTime
    """Time of the latest outcome."""
    coverage: tuple[tuple[float, float], ...] = ()
    """
    (Level, share of outcomes at most the predicted quantile of this level), in rising order of
    levels; empty for few outcomes.
    """


class OutputTokens(Moments, frozen=True, kw_only=True, omit_defaults=True):
    """Lengths of answers without an output limit."""

    quantiles: tuple[tuple[float, float], ...] = ()
    """(Level, tokens of the quantile), both rising; empty from estimators of older versions."""
    calibration: Calibration | None = None
    """Residuals in tokens of the prediction in use: the mean, capped to the request's limit."""


class TreesInForce(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Quantile trees of prefill times that routers use, and their quality on unseen samples."""

    version: int
    at: UnixTime
    """Time at which the trees were fitted."""
    samples: int
    """Number of training samples."""
    coverage: tuple[tuple[float, float], ...] = ()
    """
    (Level, share of held-out samples at most the predicted quantile of this level), in rising order
    of levels.
    """


class Profile(Message, frozen=True, kw_only=True, omit_defaults=True, tag="profile.published.v1"):
    """Everything known about (model, engine, device). The highest version wins."""

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    latency: LatencyCoefficients | None = None
    latency_error: float | None = None
    """
    Median absolute relative error of the latency model, predicted before each recent iteration.
    """
    latency_error_p95: float | None = None
    """95th percentile of the absolute relative errors of the latency model."""
    latency_bias: float | None = None
    """
    Median of the signed relative errors; negative: the latency model predicts too short times.
    """
    num_iterations: int = 0
    token_rate_per_s: float | None = None
    """Prompt and output tokens per second of one instance while busy (QLM Theta)."""
    prefill_s: Moments | None = None
    """Time from first scheduled to first token."""
    latency_calibration: Calibration | None = None
    """Calibration of the published latency models; residuals are fractions of the actual time."""
    wait_calibration: Calibration | None = None
    """Calibration of the waits predicted when requests were grouped; residuals in seconds."""
    output_tokens: dict[str, OutputTokens] = {}
    """
    Application -> output tokens, the most recently seen application last; `*` stands for all
    applications.
    """
    swap_s: dict[str, Seconds] = {}
    """Residency before the activation -> activation time."""
    kv_capacity_tokens: int | None = None
    """KV tokens of one instance, derived from the device's memory; set only in profile files."""
    prefill_trees: TreesInForce | None = None
    """Summary of the trees that are published as `shared.contracts.routing.PrefillTrees`."""


class AlarmKind(Enum):
    """Subject of an alarm."""

    SLO_AT_RISK = "slo_at_risk"
    """
    A lane's deadlines are at risk. The estimator sees no lanes; the leader predicts this itself.
    """
    INSTANCE_SLOW = "instance_slow"
    """An instance is slower than its peers at the same work."""


class AlarmRaised(Message, frozen=True, kw_only=True, omit_defaults=True, tag="alarm.raised.v1"):
    """Reason to replan before the next period."""

    alarm: AlarmKind
    lane: str | None = None
    instance_id: InstanceId | None = None
    at: UnixTime
    detail: str = ""
