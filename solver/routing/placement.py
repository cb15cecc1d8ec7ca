"""Choosing the instance of a request among scored candidates (QUARTZ §3.3)."""

from collections.abc import Sequence

from shared.contracts.base import Seconds
from solver.routing.options import Placement, Size
from solver.routing.request import Candidate, PrefillEstimate
from solver.routing.score import pressure_penalty_s, routing_score_s


def size_s(size: Size, estimate: PrefillEstimate) -> Seconds:
    """What counts as the size of a prefill."""
    return estimate.quantile_s if size is Size.QUANTILE else estimate.mean_s


def best_by_score(
    candidates: Sequence[Candidate], waits_s: Sequence[Seconds], sizes_s: Sequence[Seconds]
) -> int:
    """
    Index of the smallest score; the first of equal ones.

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
    """Index of the least loaded, of the longest match under `Placement.LOCALITY`."""
    matches = [candidate.cached_tokens for candidate in candidates]
    order = range(len(candidates))
    if placement is Placement.LOCALITY:
        return min(order, key=lambda index: (-matches[index], in_flight[index]))
    return min(order, key=lambda index: in_flight[index])
