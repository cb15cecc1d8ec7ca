"""What telemetry says to the learners, in their words."""

import math

from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import IterationsObserved, RequestObserved
from solver.prediction.decode_lengths import Answer
from solver.prediction.latency_model import predict_s

ProfileKey = tuple[str, str, str]
"""Model, engine, device."""


def answer_of(observed: RequestObserved) -> Answer | None:
    """How a completed request's answer ended; None when the model had no say in it."""
    if observed.ignore_eos:
        return None
    return Answer(
        tokens=observed.output_tokens,
        max_tokens=observed.max_tokens or math.inf,
        cut=observed.finish_reason is FinishReason.LENGTH,
    )


def time_multiples(observed: IterationsObserved, latency: LatencyCoefficients) -> list[float]:
    """Of each iteration, its time over the predicted one; those without work or time left out."""
    multiples = []
    for iteration in observed.iterations:
        predicted_s = predict_s(
            latency,
            compute_tokens=iteration.compute_tokens,
            context_tokens=iteration.context_tokens,
        )
        if predicted_s > 0 and iteration.compute_tokens > 0 and iteration.duration_s > 0:
            multiples.append(iteration.duration_s / predicted_s)
    return multiples
