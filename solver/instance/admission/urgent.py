"""How much urgent work an instance serves: requests with a target for their first tokens."""

import math
from dataclasses import dataclass

from shared.contracts.base import Seconds, UnixTime

DEFAULT_TARGET_S: Seconds = 1.0
"""Assumed target for first tokens where none was seen."""
_MEMORY_S: Seconds = 30.0
"""Time in which the mean number of urgent runs follows a change by two thirds."""
_GAPS, _FORGET_S = 10.0, (5.0, 120.0)
"""
Time without an urgent request after which none is expected: a multiple of the mean time between two
that begin here, within bounds. Ten times the mean pass once in 20,000 times between independent
arrivals.
"""
_SHARE = 0.1
"""Weight of the last request in the means of targets and stays."""


@dataclass(slots=True)
class Urgent:
    """Means over the urgent requests of an instance, and over the stays of all requests."""

    stay_s: Seconds = 0.0
    """Mean time from the begin to the end of a run; 0 before the first."""
    pace_s: Seconds = math.inf
    """Mean target for the time from token to token."""
    crowded_at: UnixTime = -math.inf
    """Time at which the server last had all the prefill that it may have at once."""
    _target_s: Seconds = math.inf
    _seen_at: UnixTime = -math.inf
    _begun_at: UnixTime = -math.inf
    _gap_s: Seconds = _FORGET_S[1] / _GAPS
    """Mean time between the begins of two urgent requests; long until some have begun."""
    _mean: float = 0.0
    _mean_at: UnixTime = -math.inf

    def seen(self, target_s: Seconds, pace_s: Seconds | None, now: UnixTime) -> None:
        """Record the targets of a request that begins."""
        if pace_s is not None:
            known = self.pace_s if math.isfinite(self.pace_s) else pace_s
            self.pace_s = known + _SHARE * (pace_s - known)
        known = self._target_s if math.isfinite(self._target_s) else target_s
        self._target_s = known + _SHARE * (target_s - known)
        gap_s = now - self._begun_at
        if 0.0 < gap_s < math.inf:
            self._gap_s += _SHARE * (gap_s - self._gap_s)
        self._seen_at = self._begun_at = now

    def noticed(self, target_s: Seconds, now: UnixTime) -> None:
        """
        Record a request in a queue, with a target of about *target_s*; the exact targets of
        requests that were served here count more.
        """
        if math.isinf(self._target_s):
            self._target_s = target_s
        self._seen_at = now

    def ended(self, stay_s: Seconds) -> None:
        """Record the end of a run."""
        self.stay_s += (stay_s - self.stay_s) * (_SHARE if self.stay_s else 1.0)

    def target_s(self, now: UnixTime) -> Seconds:
        """Mean target for first tokens; infinite if no such request has come for a while."""
        least_s, most_s = _FORGET_S
        forgets_s = min(most_s, max(least_s, _GAPS * self._gap_s))
        return self._target_s if now - self._seen_at < forgets_s else math.inf

    def mean_running(self, now: UnixTime, num_running: int) -> float:
        """
        Mean number of urgent runs, which follows *num_running*, the present number.

        Args:
            now: Unix seconds; never less than at the last call.
            num_running: Present number.
        """
        elapsed_s = max(0.0, now - self._mean_at)  # the clock of a machine may be set back
        self._mean_at = now
        if not math.isinf(elapsed_s):
            self._mean += (num_running - self._mean) * -math.expm1(-elapsed_s / _MEMORY_S)
        return max(self._mean, float(num_running))
