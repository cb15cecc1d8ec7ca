"""How long requests waited for their first tokens, and which were in time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What became of one request."""

    attained: bool
    """By its first token."""
    ttft_s: Seconds
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in the engine's prefix cache."""


LOST = ServedRequest(attained=False, ttft_s=math.inf)
"""Never answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Of many requests."""

    in_time: float
    """Percent."""
    p50_s: Seconds
    p99_s: Seconds
    cached: float
    """Percent of all prompt tokens."""

    @classmethod
    def of(cls, served: Sequence[ServedRequest]) -> Self:
        """At least one."""
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
        """For a result."""
        return {
            "in time, %": round(self.in_time, 2),
            "P50, s": round(self.p50_s, 3),
            "P99, s": round(self.p99_s, 3),
            "cached, %": round(self.cached, 1),
        }
