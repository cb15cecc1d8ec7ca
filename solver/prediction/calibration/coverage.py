"""Reliability of predictions: coverage over the latest requests (QUARTZ §3.5, §4.5)."""

import math
from collections import deque
from dataclasses import dataclass

from shared.contracts.base import Seconds
from solver.prediction.calibration.buckets import Bucket

ALL = ()
"""Regime of all requests, reported in addition to the single regimes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageOptions:
    """When predictions are no longer trusted, and when they are trusted again."""

    level: float = 0.9
    """
    Level of the watched quantile: a lower one is exceeded by more requests when prefills become
    slower, and before a calibration has followed.
    """
    under_coverage: float = 0.05
    """Share of requests, beyond the expected one, that may exceed their quantile (delta)."""
    patience: float = 17.0
    """About the logarithm of the number of correctly covered requests per false alarm."""
    regained: float = 0.5
    """Share of *under_coverage* below which predictions are trusted again, 0..1."""
    window: int = 200
    """
    Requests over which coverage is reported, and must be good before predictions are trusted again.
    """


@dataclass(frozen=True, slots=True)
class RegimeResiduals:
    """Residuals of one regime over the window."""

    count: int
    covered: float
    """Share of requests within their quantile, 0..1."""
    residual_s: Seconds
    """Mean of predicted minus actual times; negative: optimistic."""


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
    Counts misses beyond those that level and delta allow, since the last time without an excess.

    A gross error is detected within a few requests, a small one as soon as chance does not explain
    it, and a few requests alone never cause distrust.

    Source: QUARTZ §3.5, table 3: fallback when under-coverage exceeds delta.
    Decided: the paper gives neither the number of requests nor when prediction is used again.
    The excess itself selects the stretch of requests (Page's cumulative sum), because under a
    calibration that follows a change no fixed window is both quick and quiet: a walk that falls
    by delta a request, with variance v, rises by x about each exp(2 · delta · x / v) requests.
    Trust returns after a whole window whose under-coverage is below a share of delta.
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
        Count a request that got its first token; also while predictions are not trusted.

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
        """Residuals by bucket and of `ALL`, for operators: iterates over the whole window."""
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
