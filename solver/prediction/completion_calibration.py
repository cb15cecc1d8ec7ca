"""Completion times that were foretold against what happened: corrections and a report."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.contracts.base import Seconds
from solver.prediction.time_distribution import Floats, TimeDistribution, normal_quantile

LEVEL = 0.9
_MEMORY = 300.0
"""Groups after which an old one weighs 1/e."""
_WINDOW = 900
"""Groups that count at all; the oldest of them weighs a twentieth."""
_TRUSTED = 50.0
"""
As many groups speak for forecasts that are right in the mean: groups that follow one another
have waited behind the same requests and err alike, so that a few say less than they seem to.
"""
_STEP = 0.005
"""By which the share of times that may be missed changes for each time."""
_MISSES = (0.005, 0.5)
_LEAST = 20
"""Groups before anything is corrected: the 0.9 quantile of fewer is their largest or none."""
_LEAST_S, _MOST_S = 1e-3, 1e9
"""Bounds of times, so that whatever a clock said a logarithm is finite."""
_LEAST_LOG_SD = 0.01
"""Nothing is foretold to the percent; and what is told as certain can be corrected, too."""
_MOST_LOG_SD = 1.0
"""An interval from a fifth to five times the median; the mean of a wider one would run away."""
_SPREAD = (0.05, 20.0)
_RATIO = (1e-3, 1e3)
_BINS = 10


class Foretold(NamedTuple):
    """One time as it was foretold."""

    raw: TimeDistribution
    corrected: TimeDistribution


_OUTCOME = np.dtype(
    [
        ("log_ratio", np.float64),
        ("precision", np.float64),
        ("raw_covered", np.float64),
        ("covered", np.float64),
        ("probability", np.float64),
    ]
)
"""
One time that has passed: its logarithm less that of the foretold median, not corrected; one over
the foretold variance of the logarithm; the probability that was foretold for at most so long.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """How well times were foretold lately, older ones weighing less."""

    count: int
    """Of the window."""
    mean_ratio: float
    """Actual over foretold: above 1, forecasts were too early."""
    spread: float
    """By which deviations are wider than foretold, at the watched level."""
    raw_coverage: float
    """Share of actual times within the interval of the watched level, before corrections."""
    coverage: float
    """The same, as corrected when it was foretold."""
    histogram: tuple[float, ...]
    """Shares of actual times in each tenth of their corrected distributions, the earliest first;
    all alike when forecasts are as they should be (probability integral transform)."""


class CompletionCalibration:
    """
    Corrects foretold times by what came of earlier ones.

    The median is multiplied by the decayed mean ratio of actual times over foretold medians, a
    geometric mean in which a forecast counts by its precision as it was foretold. The
    logarithm's deviation is multiplied by the factor at which the interval of `level` would have
    held its share of the window: a weighted conformal quantile of distances from the median over
    foretold deviations. That share becomes a little larger with each time that is missed, and
    smaller with each that is not. Nothing is corrected by fewer than `least` times.

    Source: QLM §8.3 reports how accurate the estimator is, and corrects nothing. Weights: Barber
    et al. 2023, conformal prediction beyond exchangeability; the share: Gibbs and Candès 2021,
    adaptive conformal inference.
    Differs: forecasts learn from what came of them, for a throughput of one batch is not that of
    another load.

    Args:
        level: Of the interval that is to hold its share, above 0 and below 1.
        memory: Times after which an old one weighs 1/e.
        window: Times that count at all.
        least: Times before anything is corrected.

    Raises:
        ValueError: A bound is out of its limits; says which.
    """

    def __init__(
        self,
        *,
        level: float = LEVEL,
        memory: float = _MEMORY,
        window: int = _WINDOW,
        least: int = _LEAST,
    ) -> None:
        self._edge = float(normal_quantile((1 + level) / 2)) if 0 < level < 1 else math.nan
        if not self._edge > 0:
            raise ValueError(f"level must be above 0 and below 1, not {level}")
        if not (memory > 0 and 1 <= least <= window):
            raise ValueError("memory must be above 0, least 1 or more and at most window")
        self._level = level
        self._memory = memory
        self._least = least
        self._misses = 1 - level
        self._window = window
        self._outcomes = np.empty(0, _OUTCOME)
        """Oldest first."""
        self._found: tuple[float, float] | None = None
        """`_factors` of these outcomes, once asked for."""

    def foretell(self, raw: TimeDistribution) -> Foretold:
        """*raw*, of any shape, and what it is corrected to now."""
        if len(self._outcomes) < self._least:
            return Foretold(raw, raw)
        ratio, spread = self._factors()
        log_sd = np.minimum(_MOST_LOG_SD, spread * np.maximum(_LEAST_LOG_SD, raw.log_sd))
        log_sd = np.where(raw.mean_s > 0, log_sd, 0.0)
        mean_s = ratio * np.exp(raw.log_median + log_sd**2 / 2)
        return Foretold(raw, TimeDistribution.of(mean_s, mean_s**2 * np.expm1(log_sd**2)))

    def observe(self, told: Foretold, actual_s: Seconds) -> None:
        """
        Learn from a time that has passed.

        Args:
            told: Of one time, as `foretell` gave it then.
            actual_s: What it was; ignored unless finite and 0 or more.
        """
        if not (0 <= actual_s < math.inf and told.raw.mean_s > 0):
            return
        log_sd = max(_LEAST_LOG_SD, float(told.raw.log_sd))
        covered = self._covers(told.corrected, actual_s)
        outcome = (
            _log_ratio(actual_s, told.raw),
            log_sd**-2,
            self._covers(told.raw, actual_s),
            covered,
            float(told.corrected.cdf(actual_s)),
        )
        if len(self._outcomes) >= self._least:
            step = _STEP * (1 - self._level - (not covered))
            self._misses = _within(_MISSES, self._misses + step)
        kept = self._outcomes[max(0, len(self._outcomes) - self._window + 1) :]
        self._outcomes = np.concatenate((kept, np.array([outcome], _OUTCOME)))
        self._found = None

    def report(self) -> CalibrationReport | None:
        """How it goes; none before the first time."""
        if not len(self._outcomes):
            return None
        outcomes, weights = self._outcomes, self._weights()
        ratio, spread = self._factors()
        bins = np.minimum(_BINS - 1, (_BINS * outcomes["probability"]).astype(np.int64))
        histogram = np.bincount(bins, weights=weights, minlength=_BINS) / weights.sum()
        return CalibrationReport(
            count=len(outcomes),
            mean_ratio=ratio,
            spread=spread,
            raw_coverage=float(np.average(outcomes["raw_covered"], weights=weights)),
            coverage=float(np.average(outcomes["covered"], weights=weights)),
            histogram=tuple(histogram.tolist()),
        )

    def _covers(self, told: TimeDistribution, actual_s: Seconds) -> bool:
        low_s, high_s = told.interval(self._level)
        return bool(low_s <= actual_s <= high_s)

    def _weights(self) -> Floats:
        age = np.arange(len(self._outcomes) - 1, -1, -1)
        return np.asarray(np.exp(-age / self._memory))

    def _factors(self) -> tuple[float, float]:
        """Of the median, and of the logarithm's deviation."""
        if self._found is None:
            self._found = self._computed_factors()
        return self._found

    def _computed_factors(self) -> tuple[float, float]:
        outcomes, weights = self._outcomes, self._weights()
        known = weights * outcomes["precision"]
        log_ratio = float(known @ outcomes["log_ratio"]) / float(known.sum())
        log_ratio *= float(weights.sum()) / (float(weights.sum()) + _TRUSTED)
        scores = np.abs(outcomes["log_ratio"] - log_ratio) * np.sqrt(outcomes["precision"])
        ranked = np.argsort(scores, kind="stable")
        # The time to come counts like the latest one, and may be farther off than all of them.
        reached = np.cumsum(weights[ranked]) / (weights.sum() + 1)
        place = min(len(ranked) - 1, int(np.searchsorted(reached, 1 - self._misses)))
        spread = float(scores[ranked[place]]) / self._edge
        return _within(_RATIO, math.exp(log_ratio)), _within(_SPREAD, spread)


def _bounded_s(time_s: Seconds) -> Seconds:
    return _within((_LEAST_S, _MOST_S), time_s)


def _log_ratio(actual_s: Seconds, told: TimeDistribution) -> float:
    """Of the actual time over the median that was foretold."""
    return math.log(_bounded_s(actual_s) / _bounded_s(float(told.quantile(0.5))))


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(bounds[1], max(bounds[0], value))
