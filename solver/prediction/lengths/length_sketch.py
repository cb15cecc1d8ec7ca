"""A decaying histogram of answer lengths, in bounded memory."""

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROWTH = 1.05
"""Ratio of the longest to the shortest length of a bin; each length up to 20 has its own bin."""
LONGEST_TOKENS = 2**20
"""Largest length that is distinguished; longer answers count as this length."""


def _longest_in_bins() -> list[int]:
    powers = GROWTH ** np.arange(math.ceil(math.log(LONGEST_TOKENS) / math.log(GROWTH)))
    return sorted({*map(int, powers), LONGEST_TOKENS})


_LONGEST = _longest_in_bins()
NUM_BINS = len(_LONGEST)
_LONGEST_TOKENS = np.array(_LONGEST, dtype=np.float64)
_MIDDLE_TOKENS = (np.concatenate(([0.0], _LONGEST_TOKENS[:-1])) + 1 + _LONGEST_TOKENS) / 2
_EVENTS, _SUMS, _SQUARES, _CUTS = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Probability distribution of answer lengths, in bins."""

    mass: Floats
    """Probability of each bin of lengths, float64[NUM_BINS]; the sum is 1."""
    tokens: Floats
    """Mean length in each bin, float64[NUM_BINS]."""
    squares: Floats
    """Mean squared length in each bin, float64[NUM_BINS]."""

    @property
    def mean_tokens(self) -> float:
        return float(self.mass @ self.tokens)

    @property
    def sd_tokens(self) -> float:
        return math.sqrt(max(0.0, float(self.mass @ self.squares) - self.mean_tokens**2))

    def quantile_tokens(self, level: float) -> float:
        """
        Length that a share *level* of answers does not exceed.

        Args:
            level: 0..1.

        Returns:
            At least the exact quantile of the observations, and less than GROWTH times the exact
            quantile.
        """
        within = np.cumsum(self.mass) >= level - 1e-9
        return float(_LONGEST_TOKENS[np.argmax(within)]) if within.any() else float(LONGEST_TOKENS)


def log_normal(*, mean_tokens: float, sd_tokens: float) -> LengthDistribution:
    """The lognormal distribution with given moments, for lengths of at least one token."""
    mean_tokens = max(1.0, mean_tokens)
    variance = math.log1p((sd_tokens / mean_tokens) ** 2)
    middle, width = math.log(mean_tokens) - variance / 2, math.sqrt(2 * max(variance, 1e-6))
    # Edges are half a token further, because lengths are whole numbers.
    edges = ((math.log(longest + 0.5) - middle) / width for longest in _LONGEST[:-1])
    within = np.array([*((1 + math.erf(edge)) / 2 for edge in edges), 1.0])
    return LengthDistribution(np.diff(within, prepend=0.0), _MIDDLE_TOKENS, _MIDDLE_TOKENS**2)


class LengthSketch:
    """
    Decaying histogram of lengths with logarithmic bins, in less than 10 kB.

    Moments are exact as long as no answer was cut. Quantiles have an error below 5 %
    (`LengthDistribution.quantile_tokens`).

    Source: DDSketch (Masson et al. 2019) §2, on whole numbers and with forgetting.

    Args:
        memory: Number of answers after which an old answer weighs 1/e.
    """

    def __init__(self, *, memory: float) -> None:
        self._keep = math.exp(-1 / memory)
        self._cells = np.zeros((4, NUM_BINS))

    def observe(self, tokens: int) -> None:
        """Count an answer that the model ended after *tokens* tokens; 0 tokens count as 1."""
        tokens = min(max(1, tokens), LONGEST_TOKENS)
        self._cells *= self._keep
        place = bisect_left(_LONGEST, tokens)
        self._cells[:_CUTS, place] += (1.0, tokens, tokens * tokens)

    def observe_cut(self, tokens: int) -> None:
        """Count an answer that was cut at its limit of *tokens* tokens."""
        self._cells *= self._keep
        self._cells[_CUTS, bisect_left(_LONGEST, min(max(1, tokens), LONGEST_TOKENS))] += 1.0

    def pooled(self, parent: LengthDistribution, *, weight: float) -> LengthDistribution:
        """
        Posterior distribution of lengths; *parent* counts as *weight* answers.

        At each length, the share of longer answers falls by the number of answers that ended there
        over the number that reached this length (Kaplan-Meier). So a cut answer is assumed to be as
        long as the answers that continued beyond its cut.

        Source: the mean of a Dirichlet process after censored observations (Susarla and Van Ryzin
        1976), with *parent* as its base and *weight* as its concentration.
        Decided: if neither the answers nor *parent* have lengths above the longest cut, the
        remaining probability is that of the longest cut (Efron's convention).

        Args:
            parent: Prior distribution; returned when nothing was observed.
            weight: Number of answers that *parent* counts as, 0 or more.
        """
        ended, sums, squares, cuts = self._cells
        if not self._cells.any():
            return parent
        prior = weight * parent.mass
        events = ended + prior
        at_risk = np.cumsum((events + cuts)[::-1])[::-1]
        hazard = np.divide(events, at_risk, out=np.zeros(NUM_BINS), where=at_risk > 0)
        outlasting = np.cumprod(1 - hazard)
        mass = np.concatenate(([1.0], outlasting[:-1])) * hazard
        mass[np.flatnonzero(at_risk)[-1]] += outlasting[-1]
        known = events > 0
        tokens, squared = _LONGEST_TOKENS.copy(), _LONGEST_TOKENS**2
        np.divide(sums + prior * parent.tokens, events, out=tokens, where=known)
        np.divide(squares + prior * parent.squares, events, out=squared, where=known)
        return LengthDistribution(mass, tokens, squared)
