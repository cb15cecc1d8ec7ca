"""
Quantiles of the time that waiting requests take together, from the prediction for each request.
"""

import math
from collections.abc import Iterable
from statistics import NormalDist

from shared.contracts.base import Seconds
from shared.contracts.estimates import Profile
from shared.contracts.requests import QueuedRequest
from solver.prediction.latency.service_time import predicted_answer

_NORMAL = NormalDist()


def sum_quantile(parts: Iterable[tuple[float, float]], level: float) -> float:
    """
    Approximate quantile of a sum of independent amounts; at least 0.

    Args:
        parts: Mean and standard deviation of each amount.
        level: 0..1, both excluded; 0.5 gives the sum of the means.

    Source: QLM §6, equations 2 and 3: by the central limit theorem the sum is normal.
    """
    mean, variance = 0.0, 0.0
    for part, sd in parts:
        mean += part
        variance += sd**2
    return max(0.0, mean + _NORMAL.inv_cdf(level) * math.sqrt(variance))


def prefills_s(predicted_s: Iterable[Seconds], profile: Profile | None, *, level: float) -> Seconds:
    """
    Quantile of the time until several requests, served one after another, have their first token.

    Args:
        predicted_s: Prediction for each prefill.
        profile: Holds the latency model and its errors, which are assumed to be independent.
        level: 0..1, both excluded.
    """
    seen = None if profile is None else profile.latency_calibration
    error = 0.0 if seen is None else seen.spread
    return sum_quantile(((each_s, error * each_s) for each_s in predicted_s), level)


def tokens(requests: Iterable[QueuedRequest], profile: Profile | None, *, level: float) -> float:
    """
    Quantile of the prompt and answer tokens of several requests, capped by their limits.

    Args:
        requests: Each answer has the predicted length of its application, at most the request's
            limit.
        profile: Holds the predicted lengths; without a profile, each answer is as long as its
            limit.
        level: 0..1, both excluded.
    """
    parts, most = [], 0
    for request in requests:
        answer = predicted_answer(request, profile)
        parts.append((request.prompt_tokens + answer.mean, answer.sd))
        most += request.prompt_tokens + request.sampling.max_tokens
    return min(sum_quantile(parts, level), most)
