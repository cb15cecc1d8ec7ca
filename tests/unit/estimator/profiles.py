"""A profile from before the start of an estimator."""

from shared.contracts.base import ModelName
from shared.contracts.estimates import LatencyCoefficients, Moments, OutputTokens, Profile
from tests.clocks import NOW

MODEL = ModelName("org/model.v1")
PRIOR = Profile(
    model=MODEL,
    engine="e",
    device="d",
    version=5,
    at=NOW - 100,
    latency=LatencyCoefficients(constant_s=0.5, linear_s=0.001),
    token_rate_per_s=77.0,
    prefill_s=Moments(mean=0.3, sd=0.1, count=50),
    output_tokens={
        "*": OutputTokens(mean=60.0, sd=5.0, count=50),
        "old": OutputTokens(mean=9, sd=1, count=4, quantiles=((0.5, 9.0),)),
    },
    swap_s={"cold": 12.0},
)
