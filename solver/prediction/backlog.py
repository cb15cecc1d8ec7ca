"""How long work that waits may take, as a quantile: sums of what is predicted of each request."""

import math
from collections.abc import Iterable
from statistics import NormalDist

from shared.contracts.base import Seconds
from shared.contracts.estimates import Profile
from shared.contracts.requests import QueuedRequest
from solver.prediction.service_time import predicted_answer

_NORMAL = NormalDist()


def sum_quantile(parts: Iterable[tuple[float, float]], level: float) -> float:
    """
    What the sum of independent amounts is below with probability *level*, about; at least 0.

    Args:
        parts: Mean and standard deviation of each.
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
    Quantile of the time until all of several requests have their first token, one after another.

    Args:
        predicted_s: Of each prefill.
        profile: Whose latency model predicted them: each errs by itself, as iterations did.
        level: 0..1, both excluded.
    """
    seen = None if profile is None else profile.latency_calibration
    error = 0.0 if seen is None else seen.spread
    return sum_quantile(((each_s, error * each_s) for each_s in predicted_s), level)


def tokens(requests: Iterable[QueuedRequest], profile: Profile | None, *, level: float) -> float:
    """
    Quantile of the prompt and answer tokens of several requests, never more than they may have.

    Args:
        requests: With an answer each, as long as those of its application or as its limit.
        profile: Has the lengths; without, each answer is as long as it may be.
        level: 0..1, both excluded.
    """
    parts, most = [], 0
    for request in requests:
        answer = predicted_answer(request, profile)
        parts.append((request.prompt_tokens + answer.mean, answer.sd))
        most += request.prompt_tokens + request.sampling.max_tokens
    return min(sum_quantile(parts, level), most)
