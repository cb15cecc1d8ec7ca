"""Time that one request occupies an instance, from its profile."""

import math

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients, Moments, OutputTokens, Profile
from shared.contracts.requests import QueuedRequest
from solver.prediction.latency.latency_model import predict_batch_s, predict_s
from solver.prediction.lengths.cached_shares import expected_cached_tokens

DEFAULT_TOKEN_S = 0.002
"""Time per token that is assumed before anything was measured."""
CHUNK_TOKENS = 512
"""Prefill tokens of one iteration that are assumed for a request that runs alone."""
ALL_APPLICATIONS = "*"
"""Key of the lengths of all applications together."""
RESIDUAL_SHARE = 0.1
"""
Least expected remaining tokens of a running request, as a share of the mean answer.

The share is low on purpose: operations that wait for such a run then wait only for a short time.
"""


def predicted_prefill_s(request: QueuedRequest, profile: Profile | None) -> Seconds:
    """
    Predicted time to the first token if the request runs alone, in chunks of `CHUNK_TOKENS`; 0
    without a latency model. What a prefix cache is expected to have takes no time.
    """
    if profile is None or profile.latency is None:
        return 0.0
    share = profile.cached_share.get(request.application, 0.0)
    context = expected_cached_tokens(share, request.prompt_tokens)
    tokens = request.prompt_tokens + request.progress.num_tokens - context
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    chunks = [CHUNK_TOKENS] * whole + ([rest] if rest else [])
    total_s = 0.0
    for chunk in chunks:
        total_s += predict_s(profile.latency, compute_tokens=chunk, context_tokens=context)
        context += chunk
    return total_s


def predicted_decode_s(request: QueuedRequest, profile: Profile | None) -> Seconds:
    """
    Predicted time from the first token to the last token if the request runs alone; 0 without a
    latency model.
    """
    if profile is None or profile.latency is None:
        return 0.0
    tokens = predicted_output_tokens(request, profile) - request.progress.num_tokens
    return _decode_s(profile.latency, tokens, context_tokens=request.prompt_tokens)


def predicted_rest_s(
    request: QueuedRequest, profile: Profile | None, *, output_tokens: int, pace_s: Seconds = 0.0
) -> Seconds:
    """
    Time to the last token of an answer that has *output_tokens* so far, progress included.

    A token takes as long as alone, and at least *pace_s*: the mean duration of recent iterations,
    with the other requests and their prefills. A request beyond its predicted length is expected to
    take another `RESIDUAL_SHARE` of this length. No request is expected to exceed its limit.
    """
    if profile is None or profile.latency is None:
        return 0.0
    mean = predicted_output_tokens(request, profile)
    expected = max(RESIDUAL_SHARE * mean, mean - output_tokens)
    tokens = min(expected, request.sampling.max_tokens - output_tokens)
    alone_s = _decode_s(
        profile.latency, tokens, context_tokens=request.prompt_tokens + output_tokens
    )
    return max(alone_s, max(0.0, tokens) * pace_s)


def _decode_s(latency: LatencyCoefficients, tokens: float, *, context_tokens: int) -> Seconds:
    """Time of *tokens* consecutive decodes; the first decode has a context of *context_tokens*."""
    one_s = predict_batch_s(
        latency,
        compute_tokens=1,
        context_tokens=context_tokens + tokens / 2,
        prefill_pairs=0,
    )
    return max(0.0, tokens) * one_s


def predicted_output_tokens(request: QueuedRequest, profile: Profile | None) -> float:
    """Mean answer length of the request's application, at most the request's limit."""
    return predicted_answer(request, profile).mean


def predicted_answer(request: QueuedRequest, profile: Profile | None) -> Moments:
    """
    Predicted length of the answer in tokens, at most the request's limit; the expected length from
    the request's arrival if the profile has none.
    """
    lengths = _lengths(request, profile)
    if lengths is None:
        return Moments(mean=request.answer_tokens, sd=0.0, count=0)
    return capped(lengths, limit_tokens=request.sampling.max_tokens)


def capped(lengths: Moments, *, limit_tokens: float) -> Moments:
    """
    Moments of the answer length if the request allows at most *limit_tokens*.

    The standard deviation is bounded by the largest possible value for lengths between 0 and the
    limit (Bhatia and Davis 2000). The standard deviation is 0 if the limit cuts all answers.
    """
    mean = min(limit_tokens, lengths.mean)
    most_sd = math.sqrt(mean * (limit_tokens - mean))
    return Moments(mean=mean, sd=min(lengths.sd, most_sd), count=lengths.count)


def _lengths(request: QueuedRequest, profile: Profile | None) -> OutputTokens | None:
    """Moments of the answer's length; None if unknown, or if answers only end at their limit."""
    if profile is None or request.sampling.ignore_eos:
        return None
    lengths = profile.output_tokens
    return lengths.get(request.application) or lengths.get(ALL_APPLICATIONS)


def tokens_s(tokens: float, profile: Profile | None) -> Seconds:
    """Time that a busy instance needs to compute *tokens*."""
    if profile is None or not profile.token_rate_per_s:
        return tokens * DEFAULT_TOKEN_S
    return tokens / profile.token_rate_per_s
