"""How long one request occupies an instance, from its profile."""

import math

from shared.contracts.base import Seconds
from shared.contracts.estimates import Moments, OutputTokens, Profile
from shared.contracts.requests import QueuedRequest
from solver.prediction.latency_model import predict_s
from solver.prediction.moments import over_approximation

DEFAULT_TOKEN_S = 0.002
"""Prior time per token, before anything was measured."""
CHUNK_TOKENS = 512
ALL_APPLICATIONS = "*"


def predicted_prefill_s(request: QueuedRequest, profile: Profile | None) -> Seconds:
    """Time to the first token when the request runs alone, in chunks of 512 tokens."""
    tokens = request.prompt_tokens + len(request.progress.token_ids)
    if profile is None or profile.latency is None:
        return 0.0
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    chunks = [CHUNK_TOKENS] * whole + ([rest] if rest else [])
    context = 0
    total_s = 0.0
    for chunk in chunks:
        total_s += predict_s(profile.latency, compute_tokens=chunk, context_tokens=context)
        context += chunk
    return total_s


def predicted_decode_s(request: QueuedRequest, profile: Profile | None) -> Seconds:
    """Time from first token to last when the request runs alone."""
    if profile is None or profile.latency is None:
        return 0.0
    tokens = predicted_output_tokens(request, profile) - len(request.progress.token_ids)
    one_s = predict_s(
        profile.latency, compute_tokens=1, context_tokens=request.prompt_tokens + tokens / 2
    )
    return max(0.0, tokens) * one_s


def predicted_output_tokens(request: QueuedRequest, profile: Profile | None) -> float:
    """The application's mean output, at most what the request allows."""
    limit = request.sampling.max_tokens
    lengths = _lengths(request, profile)
    return limit if lengths is None else min(limit, lengths.mean)


def most_output_tokens(request: QueuedRequest, profile: Profile | None) -> float:
    """
    An output that must not be underestimated, at most what the request allows.

    Source: QoServe §3.4 (`over_approximation`).
    """
    limit = request.sampling.max_tokens
    lengths = _lengths(request, profile)
    return limit if lengths is None else min(limit, over_approximation(lengths))


def output_tokens_quantile(
    request: QueuedRequest, profile: Profile | None, *, level: float
) -> float:
    """
    An output that a share *level* of such requests does not exceed, at most what this one allows.

    Args:
        request: Of some application.
        profile: With its lengths; without them the limit is expected.
        level: Above 0, below 1.

    Returns:
        Tokens. Between the levels that a profile tells it is the higher one's; above them, and
        where it tells none, a bound that holds for any distribution (Cantelli's inequality).

    Raises:
        ValueError: *level* is out of range.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}: it has to be above 0 and below 1")
    limit = request.sampling.max_tokens
    lengths = _lengths(request, profile)
    if lengths is None:
        return limit
    least = 0.0
    for told, tokens in lengths.quantiles:
        least = tokens
        if told >= level:
            return min(limit, tokens)
    bound = lengths.mean + lengths.sd * math.sqrt(level / (1 - level))
    return min(limit, max(least, bound))


def capped(lengths: Moments, *, limit_tokens: float) -> Moments:
    """
    Moments of answers whose request allows *limit_tokens*.

    Between 0 and a limit lengths spread no further than so (Bhatia and Davis 2000); in
    particular, they do not spread where all are cut.
    """
    mean = min(limit_tokens, lengths.mean)
    most_sd = math.sqrt(mean * (limit_tokens - mean))
    return Moments(mean=mean, sd=min(lengths.sd, most_sd), count=lengths.count)


def _lengths(request: QueuedRequest, profile: Profile | None) -> OutputTokens | None:
    """None when nothing is known, or when only the limit ends an answer."""
    if profile is None or request.sampling.ignore_eos:
        return None
    lengths = profile.output_tokens
    return lengths.get(request.application) or lengths.get(ALL_APPLICATIONS)


def tokens_s(tokens: float, profile: Profile | None) -> Seconds:
    """How long a busy instance needs for *tokens*."""
    if profile is None or not profile.token_rate_per_s:
        return tokens * DEFAULT_TOKEN_S
    return tokens / profile.token_rate_per_s
