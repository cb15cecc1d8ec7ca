"""Corrections of predicted completion times by their outcomes, and a report of their accuracy."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.contracts.base import Seconds
from solver.prediction.time_distribution import Floats, TimeDistribution, normal_quantile

LEVEL = 0.9
"""Level of the interval that must hold its share."""
_EDGE = float(normal_quantile((1 + LEVEL) / 2))
"""Upper end of the interval of `LEVEL`, in standard deviations from the median."""
_MEMORY = 300.0
"""Groups after which an old one weighs 1/e."""
_WINDOW = 900
"""Groups in the window; the oldest of them weighs a twentieth."""
_TRUSTED = 50.0
"""
Weight of the assumption that forecasts are right in the mean, in groups: consecutive groups
waited behind the same requests and err alike, so a few prove less than their number suggests.
"""
_STEP = 0.005
"""Change of the allowed share of missed times after each outcome."""
_MISSES = (0.005, 0.5)
_LEAST = 20
"""Groups before anything is corrected: the 0.9 quantile of fewer is their largest or undefined."""
_LEAST_S, _MOST_S = 1e-3, 1e9
"""Bounds of times, so that a logarithm is finite whatever the clock returned."""
_LEAST_LOG_SD = 0.01
"""Forecasts are not accurate to a percent; also allows correcting times published as certain."""
_MOST_LOG_SD = 1.0
"""An interval from a fifth to five times the median; the mean of a wider one would diverge."""
_SPREAD = (0.05, 20.0)
_RATIO = (1e-3, 1e3)
_BINS = 10


class PredictedTime(NamedTuple):
    """One predicted time."""

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
One outcome: its logarithm minus that of the uncorrected predicted median; one over the predicted
variance of the logarithm; the predicted probability of at most this time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Accuracy of recent predictions; older ones weigh less."""

    count: int
    """Outcomes in the window."""
    mean_ratio: float
    """Actual over predicted time: above 1, forecasts were too early."""
    spread: float
    """Factor by which deviations exceed the predicted ones, at the watched level."""
    raw_coverage: float
    """Share of actual times within the interval of the watched level, before corrections."""
    coverage: float
    """As `raw_coverage`, but with the corrections made at prediction time."""
    histogram: tuple[float, ...]
    """
    Share of actual times in each decile of the corrected distribution, lowest decile first
    (probability integral transform); all are equal when forecasts are calibrated.
    """


class CompletionCalibration:
    """
    Corrects predicted times by earlier outcomes.

    The median is multiplied by the decayed mean ratio of actual times over predicted medians, a
    geometric mean in which a forecast counts by its predicted precision. The logarithm's deviation
    is multiplied by the factor at which the interval of `LEVEL` would have held its share of the
    window: a weighted conformal quantile of distances from the median over predicted deviations.
    That share grows slightly with each missed time and shrinks with each covered one. Fewer than
    `least` outcomes correct nothing.

    Source: QLM §8.3 reports how accurate the estimator is, and corrects nothing. Weights: Barber
    et al. 2023, conformal prediction beyond exchangeability; the share: Gibbs and Candès 2021,
    adaptive conformal inference.
    Differs: forecasts learn from their outcomes, because the throughput of one batch is not that of
    another load.

    Args:
        window: Outcomes in the window.
        least: Outcomes before anything is corrected.

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
        """Oldest first."""
        self._found: tuple[float, float] | None = None
        """`_factors` of these outcomes, computed on demand."""

    def predict(self, raw: TimeDistribution) -> PredictedTime:
        """*raw*, of any shape, with its current correction."""
        if len(self._outcomes) < self._least:
            return PredictedTime(raw, raw)
        ratio, spread = self._factors()
        log_sd = np.minimum(_MOST_LOG_SD, spread * np.maximum(_LEAST_LOG_SD, raw.log_sd))
        log_sd = np.where(raw.mean_s > 0, log_sd, 0.0)
        mean_s = ratio * np.exp(raw.log_median + log_sd**2 / 2)
        return PredictedTime(raw, TimeDistribution.of(mean_s, mean_s**2 * np.expm1(log_sd**2)))

    def observe(self, predicted: PredictedTime, actual_s: Seconds) -> None:
        """
        Learn from an outcome.

        Args:
            predicted: One time, as `predict` returned it then.
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
        """Current accuracy; none before the first outcome."""
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
        """Factors of the median and of the logarithm's deviation."""
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
        # The next outcome counts like the latest one, and may be farther off than all of them.
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
