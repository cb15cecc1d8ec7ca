"""PolyServe's TBT bins: one engine for each TBT target, with chunks for this target only."""

from collections.abc import Sequence
from math import inf

from ops.baselines.scheduling.shrinking_chunk import ShrinkingChunk
from shared.contracts.base import Seconds
from shared.contracts.qos import Slo
from solver.scheduling.engine.latency import LatencyTable


def tbt_bin_s(slo: Slo, bins_s: Sequence[Seconds]) -> Seconds:
    """
    The TBT bin of a request: the largest TBT that still meets the request's target.

    Args:
        slo: Without a TBT target any pace suffices.
        bins_s: TBT of each bin; at least one.

    Returns:
        One of *bins_s*; the fastest when even that is too slow for the target.

    Source: PolyServe as QoServe §4.5.2 describes it.
    """
    target_s = inf if slo.tbt_s is None else slo.tbt_s
    return max((pace_s for pace_s in bins_s if pace_s <= target_s), default=min(bins_s))


class PolyServe(ShrinkingChunk):
    """
    One engine of a TBT bin: first come first served within a fixed iteration time.

    Requests of other bins belong to other engines; all requests here are served at this bin's pace.

    Source: PolyServe as QoServe §4.5.2 and §5 describe it: separate deployments by TBT target,
    chunks as Medha's, no slack shared between classes.
    Differs: no autoscaling and no migration, as in QoServe's comparison.

    Args:
        bin_s: TBT of the bin.
        max_chunk_tokens: Maximum tokens of an iteration.
    """

    def __init__(
        self, latency: LatencyTable, *, bin_s: Seconds, max_chunk_tokens: int = 2048
    ) -> None:
        super().__init__(latency, limit_s=bin_s, max_chunk_tokens=max_chunk_tokens)
