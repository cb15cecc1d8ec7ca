"""What telemetry says to the learners, in their words."""

import math
from collections.abc import Iterator

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import Iteration, IterationsObserved, RequestObserved
from solver.prediction.decode_lengths import Answer
from solver.prediction.latency_model import predict_batch_s, predict_s

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
    for iteration, pairs in with_pairs(observed):
        predicted_s = _predicted_s(iteration, pairs, latency)
        if predicted_s > 0 and iteration.compute_tokens > 0 and iteration.duration_s > 0:
            multiples.append(iteration.duration_s / predicted_s)
    return multiples


def with_pairs(observed: IterationsObserved) -> Iterator[tuple[Iteration, int | None]]:
    """Each iteration with its prefill pairs, None where the agent does not say."""
    told = observed.prefill_pairs
    if len(told) != len(observed.iterations):
        return ((iteration, None) for iteration in observed.iterations)
    return zip(observed.iterations, told, strict=True)


def _predicted_s(iteration: Iteration, pairs: int | None, latency: LatencyCoefficients) -> Seconds:
    tokens, context = iteration.compute_tokens, iteration.context_tokens
    if pairs is None:
        return predict_s(latency, compute_tokens=tokens, context_tokens=context)
    return predict_batch_s(
        latency, compute_tokens=tokens, context_tokens=context, prefill_pairs=pairs
    )
