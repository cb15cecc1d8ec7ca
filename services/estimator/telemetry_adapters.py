"""Converts telemetry to inputs of the learners."""

import math
from collections.abc import Iterator

from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import Iteration, IterationsObserved, RequestObserved
from solver.prediction.calibration.running_calibration import RunningCalibration
from solver.prediction.latency.latency_model import one_prefills_pairs, predict_batch_s
from solver.prediction.lengths.decode_lengths import Answer
from solver.prediction.time_distribution import TimeDistribution

WAIT_LEVELS = (0.5, 0.9)
"""Quantile levels at which predicted waits are evaluated."""
WAIT_RESOLUTION_S = 0.1
ProfileKey = tuple[str, str, str]
"""Key of a profile: model, engine, device."""


def answer_of(observed: RequestObserved) -> Answer | None:
    """
    Length of a completed answer, and whether a limit cut the answer; None with `ignore_eos`.

    With `ignore_eos`, end tokens are ignored, so the model did not determine the length.
    """
    if observed.ignore_eos:
        return None
    return Answer(
        tokens=observed.output_tokens,
        max_tokens=observed.max_tokens or math.inf,
        cut=observed.finish_reason is FinishReason.LENGTH,
    )


def began_once(observed: RequestObserved) -> bool:
    """
    True if the request's first token came from its last submission to an engine, and no engine
    crashed.
    """
    return observed.first_token_at >= observed.submitted_at and not observed.crashes


def judge_wait(calibration: RunningCalibration, observed: RequestObserved) -> None:
    """
    Compare the predicted wait of a request with its actual wait.

    Requests that have no prediction, were relegated, or began more than once are ignored. If both
    waits are below `WAIT_RESOLUTION_S`, the request does not affect the coverage of quantiles.
    """
    forecast = observed.predicted_wait
    in_turn = observed.grouped_at and not observed.relegated and began_once(observed)
    if forecast is None or not in_turn:
        return
    wait_s = max(0.0, observed.submitted_at - observed.grouped_at)
    calibration.observe(forecast.mean_s - wait_s, at=observed.finished_at)
    if max(forecast.mean_s, wait_s) < WAIT_RESOLUTION_S:
        return
    place = TimeDistribution.of(forecast.mean_s, forecast.sd_s**2).cdf(wait_s)
    for level in WAIT_LEVELS:
        calibration.covered(level, float(place <= level))


def time_multiples(observed: IterationsObserved, latency: LatencyCoefficients) -> list[float]:
    """
    Actual time of each iteration divided by its predicted time; empty iterations are left out.
    """
    multiples = []
    for iteration, pairs in with_pairs(observed):
        tokens, context = iteration.compute_tokens, iteration.context_tokens
        predicted_s = predict_batch_s(
            latency,
            compute_tokens=tokens,
            context_tokens=context,
            prefill_pairs=one_prefills_pairs(tokens, context) if pairs is None else pairs,
        )
        if predicted_s > 0 and iteration.compute_tokens > 0 and iteration.duration_s > 0:
            multiples.append(iteration.duration_s / predicted_s)
    return multiples


def with_pairs(observed: IterationsObserved) -> Iterator[tuple[Iteration, int | None]]:
    """Pair each iteration with its prefill pairs, which are None if the agent reports none."""
    forecast = observed.prefill_pairs
    if len(forecast) != len(observed.iterations):
        return ((iteration, None) for iteration in observed.iterations)
    return zip(observed.iterations, forecast, strict=True)
