"""Whether predictions may be relied on: coverage over the latest requests (QUARTZ §3.5, §4.5)."""

import math
from collections import deque
from dataclasses import dataclass

from shared.contracts.base import Seconds
from solver.prediction.buckets import Bucket

ALL = ()
"""The regime of all requests, among those that residuals are reported for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageOptions:
    """When predictions are no longer relied on, and when they are again."""

    level: float = 0.9
    """Of the quantile that is watched: more requests come to exceed a lower one when prefills take
    longer, and sooner than a calibration follows."""
    under_coverage: float = 0.05
    """Share of requests, beyond those expected, that may exceed their quantile (delta)."""
    patience: float = 17.0
    """About the logarithm of the number of requests, covered as promised, for each false alarm."""
    regained: float = 0.5
    """Part of *under_coverage* within which predictions are relied on again, 0..1."""
    window: int = 200
    """Requests over which coverage is told, and has to be good before it is relied on again."""


@dataclass(frozen=True, slots=True)
class RegimeResiduals:
    """Of one regime, over the window."""

    count: int
    covered: float
    """Share of requests within their quantile, 0..1."""
    residual_s: Seconds
    """Mean of predicted less realised times; negative: optimistic."""


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
    Counts misses in excess of those that level and delta allow, from when there was no excess.

    A gross error is found within a few requests, a small one as soon as chance does not explain
    it, and few requests are never enough to distrust.

    Source: QUARTZ §3.5, table 3: fallback when under-coverage exceeds delta.
    Decided: the paper says neither over how many requests, nor when prediction is used again.
    Over a stretch of requests that the excess itself chooses (Page's cumulative sum), since under
    a calibration that follows a change no fixed window is both quick and quiet: a walk that falls
    by delta a request, with variance v, rises by x about each exp(2 · delta · x / v) requests.
    And again after a whole window whose under-coverage is below a part of delta.

    Args:
        options: Bounds and window.
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
        A request got its first token; also while predictions are not relied on.

        Args:
            bucket: Its regime.
            predicted_s: The quantile of the watched level, as it would be relied on.
            actual_s: As realised; ignored unless finite and positive.
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

    @property
    def coverage(self) -> float | None:
        """Share of the window's requests within their quantile, or None before the first one."""
        if not self._outcomes:
            return None
        return 1 - self._misses / len(self._outcomes)

    def residuals(self) -> dict[tuple[int, ...], RegimeResiduals]:
        """By bucket, and of `ALL`; for operators: it looks at the whole window."""
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
