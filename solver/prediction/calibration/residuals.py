"""Prediction errors of one regime, sorted."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from shared.contracts.routing import Residual


class Residuals:
    """
    Sorted scores of a regime's requests, and the totals for correcting means.

    `add` and `remove` take O(log n) comparisons for each level.

    Args:
        levels: Rising, 0..1.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        self._levels = levels
        self._scores: list[list[float]] = [[] for _ in levels]
        self._mean_s = 0.0
        self._actual_s = 0.0
        self._factors: list[float] = []
        """Cached correction factors; empty if the factors must be computed again."""
        self.count = 0

    def add(self, residual: Residual) -> None:
        """Add the prediction error of one request."""
        for scores, score in zip(self._scores, residual.scores, strict=True):
            insort(scores, score)
        self._mean_s += residual.mean_s
        self._actual_s += residual.actual_s
        self._factors = []
        self.count += 1

    def remove(self, residual: Residual) -> None:
        """Remove the prediction error of a request that was added before."""
        for scores, score in zip(self._scores, residual.scores, strict=True):
            del scores[bisect_left(scores, score)]
        self._factors = []
        self.count -= 1
        # The sums are set to 0 with the last residual, so that rounding errors do not accumulate.
        self._mean_s = self._mean_s - residual.mean_s if self.count else 0.0
        self._actual_s = self._actual_s - residual.actual_s if self.count else 0.0

    def factors(self) -> Sequence[float]:
        """
        Correction factors: one for the quantile of each level, then one for the mean.

        The factor of a level is the smallest that would have covered min(n, ceil((n + 1) · level))
        of the n requests; n must be 1 or more.

        Source: conformalized quantile regression (Romano et al. 2019), eqs 9-10.
        Differs: scores are logarithms of ratios instead of differences, because prefill times
        within a regime differ more than relative errors do. With logarithms, an engine that becomes
        twice as slow shifts all scores equally.
        """
        if not self._factors:
            ranks = [min(self.count, math.ceil((self.count + 1) * level)) for level in self._levels]
            scores = (each[rank - 1] for each, rank in zip(self._scores, ranks, strict=True))
            mean = self._actual_s / self._mean_s if self._mean_s > 0 else 1.0
            self._factors = [*map(math.exp, scores), mean]
        return self._factors
