"""Corrections of predicted completion times by earlier outcomes, and a report of their accuracy."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.contracts.base import Seconds
from solver.prediction.time_distribution import Floats, TimeDistribution, normal_quantile

LEVEL = 0.9
"""Level of the central interval that is calibrated: it must contain this share of actual times."""
_EDGE = float(normal_quantile((1 + LEVEL) / 2))
"""Upper end of the interval of `LEVEL`, in standard deviations from the median."""
_MEMORY = 300.0
"""Number of groups after which the outcome of an old group has weight 1/e."""
_WINDOW = 900
"""Number of groups whose outcomes are kept; the oldest has a weight of 1/20."""
_TRUSTED = 50.0
"""
Weight of the assumption that forecasts are right in the mean, as a number of groups. Consecutive
groups wait behind the same requests and have similar errors, so a few groups prove little.
"""
_STEP = 0.005
"""Step by which each outcome changes the allowed share of times outside their intervals."""
_MISSES = (0.005, 0.5)
_LEAST = 20
"""
Least number of groups for a correction; the 0.9 quantile of fewer groups is their largest value or
undefined.
"""
_LEAST_S, _MOST_S = 1e-3, 1e9
"""Bounds of times, with which the logarithm of every measured time is finite."""
_LEAST_LOG_SD = 0.01
"""Least spread of the logarithm: no forecast is exact, and a certain time can also be corrected."""
_MOST_LOG_SD = 1.0
"""
Largest spread of the logarithm: an interval from a fifth to five times the median; larger spreads
would let means diverge.
"""
_SPREAD = (0.05, 20.0)
_RATIO = (1e-3, 1e3)
_BINS = 10


class PredictedTime(NamedTuple):
    """One predicted time, before and after the correction."""

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
Fields of one outcome of a predicted time.

`log_ratio` is the logarithm of the actual time over the uncorrected predicted median, and
`precision` is one over the predicted variance of this logarithm. `raw_covered` and `covered` state
whether the interval before and after the correction contained the actual time. `probability` is the
corrected probability of at most the actual time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Accuracy of recent predictions of times; older predictions have less weight."""

    count: int
    """Number of outcomes in the window."""
    mean_ratio: float
    """Mean ratio of actual to predicted time; above 1 if predicted times are too early."""
    spread: float
    """Ratio of actual to predicted deviations at the level of the calibrated interval."""
    raw_coverage: float
    """Share of actual times within the uncorrected interval of the calibrated level."""
    coverage: float
    """Share of actual times within the corrected interval of the calibrated level."""
    histogram: tuple[float, ...]
    """
    Share of actual times in each decile of the corrected distribution, lowest decile first
    (probability integral transform); all are equal when forecasts are calibrated.
    """


class CompletionCalibration:
    """
    Corrects predicted times by earlier outcomes.

    The predicted median is multiplied by the decayed geometric mean of the ratios of actual times
    to predicted medians; a forecast counts by its predicted precision. The deviation of the
    logarithm is multiplied by the factor with which the interval of `LEVEL` would have covered its
    share of the window. The factor is a weighted conformal quantile of distances from the median
    over predicted deviations. The share grows slightly with each missed time and shrinks with each
    covered time. Fewer than `least` outcomes correct nothing.

    Source: QLM §8.3 reports how accurate the estimator is, and corrects nothing. Weights: Barber
    et al. 2023, conformal prediction beyond exchangeability. Adaptive share: Gibbs and Candès 2021,
    adaptive conformal inference.
    Differs: forecasts are corrected by their outcomes, because the throughput depends on the load
    and the profile was measured with one batch.

    Args:
        window: Outcomes in the window.
        least: Number of outcomes from which predictions are corrected.

    Raises:
        ValueError: *least* is below 1 or above *window*.
    """

    def __init__(
        self,
        *,
        window: int = _WINDOW,
        least: int = _LEAST,
    ) -> None:
        if not 1 <= least <= window:
            raise ValueError("least must be 1 or more and at most window")
        self._least = least
        self._misses = 1 - LEVEL
        self._window = window
        self._outcomes = np.empty(0, _OUTCOME)
        """Outcomes of predicted times, oldest first."""
        self._found: tuple[float, float] | None = None
        """Correction factors of `_outcomes`; computed by `_factors` when they are needed."""

    def predict(self, raw: TimeDistribution) -> PredictedTime:
        """Predicted times *raw*, of any shape, together with the corrected times."""
        if len(self._outcomes) < self._least:
            return PredictedTime(raw, raw)
        ratio, spread = self._factors()
        log_sd = np.minimum(_MOST_LOG_SD, spread * np.maximum(_LEAST_LOG_SD, raw.log_sd))
        log_sd = np.where(raw.mean_s > 0, log_sd, 0.0)
        mean_s = ratio * np.exp(raw.log_median + log_sd**2 / 2)
        return PredictedTime(raw, TimeDistribution.of(mean_s, mean_s**2 * np.expm1(log_sd**2)))

    def observe(self, predicted: PredictedTime, actual_s: Seconds) -> None:
        """
        Learn from the outcome of a predicted time.

        Args:
            predicted: One predicted time, as returned by `predict` before the outcome.
            actual_s: The actual time; ignored unless finite and 0 or more.
        """
        if not (0 <= actual_s < math.inf and predicted.raw.mean_s > 0):
            return
        log_sd = max(_LEAST_LOG_SD, float(predicted.raw.log_sd))
        covered = self._covers(predicted.corrected, actual_s)
        outcome = (
            _log_ratio(actual_s, predicted.raw),
            log_sd**-2,
            self._covers(predicted.raw, actual_s),
            covered,
            float(predicted.corrected.cdf(actual_s)),
        )
        if len(self._outcomes) >= self._least:
            step = _STEP * (1 - LEVEL - (not covered))
            self._misses = _within(_MISSES, self._misses + step)
        kept = self._outcomes[max(0, len(self._outcomes) - self._window + 1) :]
        self._outcomes = np.concatenate((kept, np.array([outcome], _OUTCOME)))
        self._found = None

    def report(self) -> CalibrationReport | None:
        """
        Accuracy of the predicted times whose outcomes are in the window; none before the first
        outcome.
        """
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

    def _covers(self, predicted: TimeDistribution, actual_s: Seconds) -> bool:
        low_s, high_s = predicted.interval(LEVEL)
        return bool(low_s <= actual_s <= high_s)

    def _weights(self) -> Floats:
        age = np.arange(len(self._outcomes) - 1, -1, -1)
        return np.asarray(np.exp(-age / _MEMORY))

    def _factors(self) -> tuple[float, float]:
        """
        Correction factors of the predicted median and of the standard deviation of the logarithm.
        """
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
        # The next outcome counts with the weight of the latest, and its score may be above all
        # known scores.
        reached = np.cumsum(weights[ranked]) / (weights.sum() + 1)
        place = min(len(ranked) - 1, int(np.searchsorted(reached, 1 - self._misses)))
        spread = float(scores[ranked[place]]) / _EDGE
        return _within(_RATIO, math.exp(log_ratio)), _within(_SPREAD, spread)


def _bounded_s(time_s: Seconds) -> Seconds:
    return _within((_LEAST_S, _MOST_S), time_s)


def _log_ratio(actual_s: Seconds, predicted: TimeDistribution) -> float:
    """Logarithm of the actual time over the predicted median."""
    return math.log(_bounded_s(actual_s) / _bounded_s(float(predicted.quantile(0.5))))


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(bounds[1], max(bounds[0], value))
