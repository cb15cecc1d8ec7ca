"""What telemetry says to the learners, in their words."""

import math

from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import RequestObserved
from solver.prediction.decode_lengths import Answer


def answer_of(observed: RequestObserved) -> Answer | None:
    """How a completed request's answer ended; None when the model had no say in it."""
    if observed.ignore_eos:
        return None
    return Answer(
        tokens=observed.output_tokens,
        max_tokens=observed.max_tokens or math.inf,
        cut=observed.finish_reason is FinishReason.LENGTH,
    )
