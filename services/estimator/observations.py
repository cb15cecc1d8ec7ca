"""What telemetry says to the learners, in their words."""

import math
from collections.abc import Iterator

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import Iteration, IterationsObserved, RequestObserved
from solver.prediction.decode_lengths import Answer
from solver.prediction.latency_model import predict_batch_s, predict_s
from solver.prediction.running_calibration import RunningCalibration
from solver.prediction.time_distribution import TimeDistribution

WAIT_LEVELS = (0.5, 0.9)
"""Of a wait's distribution, at which it is judged."""
WAIT_RESOLUTION_S = 0.1
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


def began_once(observed: RequestObserved) -> bool:
    """Whether it has a first token, of the turn that is told of and not of one before."""
    return observed.first_token_at >= observed.submitted_at and not observed.crashes


def judge_wait(calibration: RunningCalibration, observed: RequestObserved) -> None:
    """
    Hold what a request was foretold against how long it waited.

    Nothing where it was foretold nothing, was not served in its turn, or began more than once.
    Waits of less than `WAIT_RESOLUTION_S`, foretold as such, are in no quantile's favour.
    """
    told = observed.foretold
    in_turn = observed.grouped_at and not observed.relegated and began_once(observed)
    if told is None or not in_turn:
        return
    wait_s = max(0.0, observed.submitted_at - observed.grouped_at)
    calibration.observe(told.mean_s - wait_s, at=observed.finished_at)
    if max(told.mean_s, wait_s) < WAIT_RESOLUTION_S:
        return
    place = TimeDistribution.of(told.mean_s, told.sd_s**2).cdf(wait_s)
    for level in WAIT_LEVELS:
        calibration.covered(level, float(place <= level))


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
