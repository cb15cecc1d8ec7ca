"""Reliability of predictions: coverage over the latest requests (QUARTZ §3.5, §4.5)."""

import math
from collections import deque
from dataclasses import dataclass

from shared.contracts.base import Seconds
from solver.prediction.calibration.buckets import Bucket

ALL = ()
"""Regime that contains all requests; it is reported in addition to the single regimes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageOptions:
    """Thresholds at which predictions lose trust and regain trust."""

    level: float = 0.9
    """
    Level of the watched quantile. A low level detects slower prefills early: more requests exceed a
    low quantile, even before the calibration has followed.
    """
    under_coverage: float = 0.05
    """
    Share of requests (delta) that may exceed their quantile in addition to the expected share 1 -
    `level`.
    """
    patience: float = 17.0
    """Logarithm of the number of correctly covered requests per false alarm, approximately."""
    regained: float = 0.5
    """Share of *under_coverage* below which predictions are trusted again, 0..1."""
    window: int = 200
    """
    Number of requests over which coverage is reported; it must be good over as many requests before
    predictions are trusted again.
    """


@dataclass(frozen=True, slots=True)
class RegimeResiduals:
    """Coverage and mean residual of one regime over the window."""

    count: int
    covered: float
    """Share of requests within their quantile, 0..1."""
    residual_s: Seconds
    """
    Mean prediction error, predicted minus actual time; negative if predictions are optimistic.
    """


_DEFAULT = CoverageOptions()


@dataclass(frozen=True, slots=True)
class _Outcome:
    bucket: Bucket
    predicted_s: Seconds
    actual_s: Seconds

    @property
    def missed(self) -> bool:
        return bool(self.actual_s > self.predicted_s)


class CoverageMonitor:
    """
    Monitor of coverage: predictions lose trust when more requests miss than level and delta allow.

    A gross error is detected within a few requests. A small error is detected as soon as chance
    does not explain it. A few requests alone never end the trust.

    Source: QUARTZ §3.5, table 3: fallback when under-coverage exceeds delta.
    Decided: the paper gives neither the number of requests nor the end of the fallback. The excess
    of misses is a cumulative sum (Page) that restarts at 0, because no fixed window detects changes
    quickly without false alarms while a calibration follows the change. A random walk that falls by
    delta per request, with variance v, rises by x about once in exp(2 · delta · x / v) requests.
    Trust returns after a whole window in which under-coverage is below a share of delta.
    """

    def __init__(self, options: CoverageOptions = _DEFAULT) -> None:
        self.level = options.level
        expected, delta = 1 - options.level, options.under_coverage
        self._allowed_share = expected + delta
        self._most_excess = options.patience * expected * options.level / (2 * delta)
        self._few_misses = (expected + options.regained * delta) * options.window
        self._size = options.window
        self._outcomes: deque[_Outcome] = deque()
        self._misses = 0
        self._excess = 0.0
        self._distrusted_for = 0
        self.trusted = True

    def observe(self, bucket: Bucket, predicted_s: Seconds, actual_s: Seconds) -> None:
        """
        Count a request that had its first token; call this method also while predictions are not
        trusted.

        Args:
            bucket: The request's regime.
            predicted_s: Quantile of the watched level, as the router would use it.
            actual_s: Measured time; ignored unless finite and positive.
        """
        if not (math.isfinite(actual_s) and actual_s > 0):
            return
        outcome = _Outcome(bucket, predicted_s, actual_s)
        self._outcomes.append(outcome)
        self._misses += outcome.missed
        if len(self._outcomes) > self._size:
            self._misses -= self._outcomes.popleft().missed
        if self.trusted:
            self._excess = max(0.0, self._excess + outcome.missed - self._allowed_share)
            self.trusted = self._excess <= self._most_excess
            self._distrusted_for = 0
        else:
            self._distrusted_for += 1
            self.trusted = self._distrusted_for >= self._size and self._misses <= self._few_misses
            self._excess = 0.0

    def residuals(self) -> dict[tuple[int, ...], RegimeResiduals]:
        """
        Coverage and prediction errors of each regime and of `ALL`, for operators; takes O(window).
        """
        regimes: dict[tuple[int, ...], list[_Outcome]] = {}
        for outcome in self._outcomes:
            regimes.setdefault(ALL, []).append(outcome)
            regimes.setdefault(outcome.bucket, []).append(outcome)
        return {regime: _summary(outcomes) for regime, outcomes in regimes.items()}


def _summary(outcomes: list[_Outcome]) -> RegimeResiduals:
    count = len(outcomes)
    return RegimeResiduals(
        count=count,
        covered=1 - sum(each.missed for each in outcomes) / count,
        residual_s=sum(each.predicted_s - each.actual_s for each in outcomes) / count,
    )
