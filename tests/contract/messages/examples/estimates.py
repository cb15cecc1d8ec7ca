"""One example of every message of `shared.contracts.estimates`."""

from shared.contracts.base import Message
from shared.contracts.estimates import (
    AlarmKind,
    AlarmRaised,
    LatencyCoefficients,
    Moments,
    OutputTokens,
    Profile,
)
from tests.contract.messages.examples.lanes import LANE

EXAMPLES: tuple[Message, ...] = (
    Profile(
        model="tiny",
        engine="vllm-0.32.0",
        device="cpu",
        version=7,
        at=1000.5,
        latency=LatencyCoefficients(constant_s=0.004, linear_s=0.0001, cross_s=1e-8),
        latency_error=0.05,
        num_iterations=300,
        token_rate_per_s=220.5,
        prefill_s=Moments(mean=0.2, sd=0.05, count=40),
        output_tokens={"*": OutputTokens(mean=64.0, sd=20.0, count=40)},
        swap_s={"warm": 0.5, "cold": 3.25},
    ),
    AlarmRaised(alarm=AlarmKind.SLO_AT_RISK, lane=LANE, instance_id="i1", at=1000.5, detail="late"),
)
