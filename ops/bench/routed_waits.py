"""Waiting times of requests until the first token, and the share in time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """Outcome of one request in a routed mesh."""

    attained: bool
    """True if the first token of the request was in time."""
    ttft_s: Seconds
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that were found in the engine's prefix cache."""


LOST = ServedRequest(attained=False, ttft_s=math.inf)
"""Outcome of a request that was never answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Waiting times of many requests."""

    in_time: float
    """Share of requests in time, in percent."""
    p50_s: Seconds
    p99_s: Seconds
    cached: float
    """Share of prompt tokens that were found in a prefix cache, in percent of all prompt tokens."""

    @classmethod
    def of(cls, served: Sequence[ServedRequest]) -> Self:
        """Compute the statistics of *served*, which contains at least one request."""
        ttfts_s = [each.ttft_s for each in served]
        return cls(
            in_time=100 * sum(each.attained for each in served) / len(served),
            p50_s=float(np.quantile(ttfts_s, 0.5, method="lower")),
            p99_s=float(np.quantile(ttfts_s, 0.99, method="lower")),
            cached=100
            * sum(each.cached_tokens for each in served)
            / max(1, sum(each.prompt_tokens for each in served)),
        )

    def rounded(self) -> dict[str, float]:
        """Copy of the statistics with values that are rounded for a result."""
        return {
            "in time, %": round(self.in_time, 2),
            "P50, s": round(self.p50_s, 3),
            "P99, s": round(self.p99_s, 3),
            "cached, %": round(self.cached, 1),
        }
