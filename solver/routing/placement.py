"""Choice of the instance for a request among scored candidates (QUARTZ §3.3)."""

from collections.abc import Mapping, Sequence

import numpy as np

from shared.contracts.base import InstanceId, Seconds
from solver.routing.options import Placement, Size
from solver.routing.request import Candidate, PrefillEstimate

PRESSURE_FROM = 0.9
"""KV utilization below which an engine rarely has to wait for memory."""
PRESSURE_S = 2.0
"""Penalty in seconds for an engine without free KV, where a request waits until a decode ends."""


def routing_score_s(
    *, expected_wait_s: Seconds, prefill_quantile_s: Seconds, pressure_s: Seconds
) -> Seconds:
    """
    Score of a candidate: a conservative time to the first token; smaller is better.

    Source: QUARTZ eq. 4. The wait is a mean, because quantiles do not add up; only the prefill of
    this request counts at its quantile.
    """
    return expected_wait_s + prefill_quantile_s + pressure_s


def pressure_penalty_s(kv_utilization: float) -> Seconds:
    """
    Penalty in seconds for an engine with little free KV; never falls as utilization rises.

    Source: QUARTZ §3.3, psi.
    Decided: the paper gives no formula. Here the penalty is 0 up to a utilization of
    `PRESSURE_FROM`, and then grows linearly to `PRESSURE_S` at a utilization of 1.
    """
    excess = min(1.0, kv_utilization) - PRESSURE_FROM
    return PRESSURE_S * max(0.0, excess) / (1.0 - PRESSURE_FROM)


def size_s(size: Size, estimate: PrefillEstimate) -> Seconds:
    """Size of a prefill in seconds, by the kind of estimate *estimate*."""
    return estimate.quantile_s if size is Size.QUANTILE else estimate.mean_s


def best_by_score(
    candidates: Sequence[Candidate], waits_s: Sequence[Seconds], sizes_s: Sequence[Seconds]
) -> int:
    """
    Index of the smallest score; the first index if several are equal.

    Source: QUARTZ eq. 5.
    """
    scores = [
        routing_score_s(
            expected_wait_s=wait_s,
            prefill_quantile_s=size,
            pressure_s=pressure_penalty_s(candidate.kv_utilization),
        )
        for candidate, wait_s, size in zip(candidates, waits_s, sizes_s, strict=True)
    ]
    return scores.index(min(scores))


def best_by_load(
    placement: Placement, candidates: Sequence[Candidate], in_flight: Sequence[int]
) -> int:
    """
    Index of the least loaded candidate; with `Placement.LOCALITY`, of the candidate with the
    longest prefix match.
    """
    matches = [candidate.cached_tokens for candidate in candidates]
    order = range(len(candidates))
    if placement is Placement.LOCALITY:
        return min(order, key=lambda index: (-matches[index], in_flight[index]))
    return min(order, key=lambda index: in_flight[index])


def candidate_set(
    instances: Sequence[InstanceId],
    *,
    cached_tokens: Mapping[InstanceId, int],
    num_candidates: int | None,
    random: np.random.Generator,
) -> list[InstanceId]:
    """
    Instances to score, in the order of *instances*.

    Args:
        instances: All instances that may serve the request; at least one.
        cached_tokens: Cached tokens of the request's prompt by instance; 0 for missing instances.
        num_candidates: K; none means all instances.
        random: Draws the candidates that are not chosen for their prefix match.

    Source: QUARTZ §3.3, power of two choices.
    Decided: the instance with the longest prefix match is always among the K. Otherwise K = 2 would
    lose half of all prefix hits with four instances.
    """
    if num_candidates is None or num_candidates >= len(instances):
        return list(instances)
    best = max(instances, key=lambda instance: cached_tokens.get(instance, 0))
    kept = [best] if cached_tokens.get(best, 0) > 0 else []
    others = [instance for instance in instances if instance not in kept]
    missing = max(0, num_candidates - len(kept))
    drawn = {others[i] for i in random.permutation(len(others))[:missing]}
    return [instance for instance in instances if instance in drawn or instance in kept]
