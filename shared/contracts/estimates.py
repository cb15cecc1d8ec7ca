"""What the estimator publishes: versioned profiles that hot paths evaluate themselves."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, ModelName, Seconds, UnixTime, Value

Coefficient = Annotated[float, Meta(ge=0)]
"""More work never takes less time."""


class LatencyCoefficients(Value, frozen=True, kw_only=True):
    """
    One iteration's time (ConServe §4.2), for P tokens computed over C tokens of context.

    duration_s = constant_s + linear_s·P + attention_s·P² + cross_s·P·C + context_s·C

    Of a batch, P·C + P²/2 in the third and fourth term is the sum over its prefills of
    n·(before + n/2), for n tokens after *before* others: decodes only read their context.

    Differs: the communication term is merged into the others, since at a fixed tensor
    parallelism it cannot be told apart from them.
    """

    constant_s: Coefficient
    linear_s: Coefficient
    attention_s: Coefficient = 0.0
    cross_s: Coefficient = 0.0
    context_s: Coefficient = 0.0


class Moments(Value, frozen=True, kw_only=True):
    """Mean, standard deviation and how many samples they rest on."""

    mean: float
    sd: float
    count: int


class Calibration(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Predictions against what came, lately; each was made before its outcome was known."""

    count: int
    bias: float
    """Mean of the residuals, predicted less realised; negative: optimistic."""
    spread: float
    """Standard deviation of the residuals."""
    at: UnixTime
    """Of the latest outcome."""
    coverage: tuple[tuple[float, float], ...] = ()
    """(Level, share of outcomes within its quantile), levels rising; not of few outcomes."""


class OutputTokens(Moments, frozen=True, kw_only=True, omit_defaults=True):
    """Lengths of answers, as they would be without a limit."""

    quantiles: tuple[tuple[float, float], ...] = ()
    """(Level, tokens), both rising; not told by estimators of older versions."""
    calibration: Calibration | None = None
    """Residuals in tokens, of what services evaluate: the mean, at most the request's limit."""


class TreesInForce(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Quantile trees of prefill times that routers are given, and how they did before that."""

    version: int
    at: UnixTime
    """When they were fitted."""
    samples: int
    """Learnt of."""
    coverage: tuple[tuple[float, float], ...] = ()
    """(Level, share of samples within its quantile that were not learnt of), levels rising."""


class Profile(Message, frozen=True, kw_only=True, omit_defaults=True, tag="profile.published.v1"):
    """Everything known about (model, engine, device). The highest version wins."""

    model: ModelName
    engine: str
    device: str
    version: int
    at: UnixTime
    latency: LatencyCoefficients | None = None
    latency_error: float | None = None
    """Median absolute relative error of the latency model, told before recent iterations."""
    latency_error_p95: float | None = None
    """The 95th percentile of the same errors."""
    latency_bias: float | None = None
    """Median of the signed errors; negative predicts too little."""
    num_iterations: int = 0
    token_rate_per_s: float | None = None
    """Prompt and output tokens per second of one instance while busy (QLM Theta)."""
    prefill_s: Moments | None = None
    """First scheduled to first token."""
    latency_calibration: Calibration | None = None
    """Of the latency models published; residuals are parts of the realised time."""
    wait_calibration: Calibration | None = None
    """Of the waits that requests were foretold when they were grouped; residuals in seconds."""
    output_tokens: dict[str, OutputTokens] = {}
    """Per application, the latest last; `*` is all."""
    swap_s: dict[str, Seconds] = {}
    """Activation time by residency it started from."""
    kv_capacity_tokens: int | None = None
    """Of one instance; only in files, where a device's memory told it."""
    prefill_trees: TreesInForce | None = None
    """Published beside profiles as `shared.contracts.routing.PrefillTrees`."""


class AlarmKind(Enum):
    """What is warned of."""

    SLO_AT_RISK = "slo_at_risk"
    """Of a lane. The estimator sees no lanes; the leader foresees this itself."""
    INSTANCE_SLOW = "instance_slow"
    """An instance is slower than its peers at the same work."""


class AlarmRaised(Message, frozen=True, kw_only=True, omit_defaults=True, tag="alarm.raised.v1"):
    """A reason to plan again before the next period."""

    alarm: AlarmKind
    lane: str | None = None
    instance_id: InstanceId | None = None
    at: UnixTime
    detail: str = ""
