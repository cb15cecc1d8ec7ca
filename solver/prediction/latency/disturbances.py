"""Detection of disturbed observations, which differ from most observations of their kind."""

import numpy as np
from numpy.typing import NDArray

from solver.prediction.least_squares import Floats

Indices = NDArray[np.int64]

_LEAST_OF_A_KIND = 16
_LEAST_OF_THE_LARGEST = 4
"""
Least number of observations of the kind with the largest size; the median of fewer may be a
disturbed observation.
"""
_SPREADS = 5.0
"""
Number of median deviations from which an observation has no weight; equals 3.4 standard deviations.
"""
_LEAST_SPREAD = 0.02
"""Least assumed spread of logarithms; a smaller measured spread occurs by chance."""


def kinds_of(sizes: Floats) -> Indices:
    """
    Kinds of observations by size: powers of two; rare kinds are merged with their neighbours.

    Args:
        sizes: float64[n], at least 1.

    Returns:
        int64[n], numbers of kinds from 0 on without gaps. A kind has at least 16 observations,
        unless there is only one kind. For the largest kind, 4 observations are enough if some of
        their sizes are over twice those of the kind before. In a merged kind they would count as
        disturbed.
    """
    powers = np.floor(np.log2(np.maximum(sizes, 1.0))).astype(np.int64)
    counts = np.bincount(powers)
    kind, held, last_power = 0, 0, len(counts)
    of_power = np.zeros(len(counts), dtype=np.int64)
    for power, count in enumerate(counts):
        of_power[power] = kind
        held += int(count)
        if held >= _LEAST_OF_A_KIND:
            kind, held, last_power = kind + 1, 0, power
    if held < _LEAST_OF_THE_LARGEST or len(counts) - 1 - last_power <= 1:
        of_power = np.minimum(of_power, max(0, kind - 1))
    of_each: Indices = of_power[powers]
    return of_each


def trust(values: Floats, kinds: Indices, weights: Floats) -> Floats:
    """
    Trust in each value, 0..1: Tukey's biweight around its kind's median.

    Most observations of a kind are always trusted, even if the fit is wrong for the kind. So a rare
    kind that the fit does not yet cover is not considered disturbed.

    Args:
        values: float64[n]; logarithms of ratios, so that half and twice are equally far away.
        kinds: int64[n], as returned by `kinds_of`.
        weights: float64[n], positive; weight of each value in medians.

    Returns:
        float64[n].
    """
    trusted = np.empty_like(values)
    for kind in range(int(kinds.max(initial=-1)) + 1):
        own = kinds == kind
        away = np.abs(values[own] - weighted_median(values[own], weights[own]))
        spread = max(_LEAST_SPREAD, weighted_median(away, weights[own]))
        trusted[own] = np.maximum(0.0, 1 - (away / (_SPREADS * spread)) ** 2) ** 2
    return trusted


def weighted_median(values: Floats, weights: Floats) -> float:
    """
    The least of *values* with at least half of the weight at or below it.

    *values* must not be empty.
    """
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order[int(np.searchsorted(below, below[-1] / 2))]])
