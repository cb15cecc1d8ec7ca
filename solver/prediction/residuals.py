"""Residuals of one regime, in order of size."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from shared.contracts.routing import Residual


class Residuals:
    """
    Sorted scores of some requests, and the totals that correct means.

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
        """As of now, unless empty."""
        self.count = 0

    def add(self, residual: Residual) -> None:
        """Count it in."""
        for scores, score in zip(self._scores, residual.scores, strict=True):
            insort(scores, score)
        self._mean_s += residual.mean_s
        self._actual_s += residual.actual_s
        self._factors = []
        self.count += 1

    def remove(self, residual: Residual) -> None:
        """Forget one that was added."""
        for scores, score in zip(self._scores, residual.scores, strict=True):
            del scores[bisect_left(scores, score)]
        self._factors = []
        self.count -= 1
        # Rounding errors of differences do not outlive the last residual.
        self._mean_s = self._mean_s - residual.mean_s if self.count else 0.0
        self._actual_s = self._actual_s - residual.actual_s if self.count else 0.0

    def factors(self) -> Sequence[float]:
        """
        What to multiply predictions by: each level's quantile, then the mean; not when empty.

        A level's is the smallest that would have covered ceil((n + 1) · level) of the n requests,
        or all of them where that is more than n.

        Source: conformalized quantile regression (Romano et al. 2019), eqs 9-10.
        Differs: scores are logarithms of ratios instead of differences, since prefill times of a
        regime differ by more than their errors do; so an engine that is twice as slow moves all
        scores alike.
        """
        if not self._factors:
            ranks = [min(self.count, math.ceil((self.count + 1) * level)) for level in self._levels]
            scores = (each[rank - 1] for each, rank in zip(self._scores, ranks, strict=True))
            mean = self._actual_s / self._mean_s if self._mean_s > 0 else 1.0
            self._factors = [*map(math.exp, scores), mean]
        return self._factors
