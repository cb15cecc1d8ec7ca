"""Pace at which one instance completes expected work, and progress of this work (QUARTZ §4.4)."""

from math import exp

from shared.contracts.base import Seconds, UnixTime

MIN_PACE, MAX_PACE = 0.25, 4.0
"""
Limits of the pace: batched prefills give a pace above 1; a pace beyond these limits is a fault.
"""
_MEMORY_S = 20.0
_PRIOR_S = 1.0
"""Weight of the prior, a pace of 1, in seconds of service."""
_CORRECTION_SHARE = 0.5
"""Share of the difference between report and assumed work that is corrected: reports are late."""
_CORRECTION_FADES_S = 1.0
"""Time constant with which a correction decays; reports come once a second."""
_STALL_S, _STALL_FACTOR = 1.0, 10.0
"""
Service longer than `_STALL_S` plus `_STALL_FACTOR` times the expected time is a stall.
"""
_KEPT = 1 - 1 / 256
"""Factor by which old requests lose weight in the mean time per token with each new request."""


class ServicePace:
    """
    Recent pace and progress of prefill work on one instance.

    Decided: the pace is the expected work that is done per second of service. The pace may be above
    1, because several prefills share iterations under continuous batching. Until the next first
    token or report, an instance is assumed to do at most the work of one typical request.
    """

    def __init__(self) -> None:
        self._served_s = 0.0
        self._busy_s = 0.0
        self._since: UnixTime = 0.0
        self._correction_s = 0.0
        self._corrected_at: UnixTime = 0.0
        self._added_s = 0.0
        self._added_tokens = 0.0
        self.value = 1.0
        """
        Pace of the instance: seconds of expected work done per second; only this class writes it.
        """

    @property
    def token_s(self) -> Seconds:
        """
        Expected seconds per token over the last hundreds of requests; 0 before the first request.
        """
        return self._added_s / self._added_tokens if self._added_tokens else 0.0

    def add(self, mean_s: Seconds, tokens: int) -> None:
        """Add a request with *mean_s* seconds of expected work and *tokens* to compute."""
        self._added_s = _KEPT * self._added_s + mean_s
        self._added_tokens = _KEPT * self._added_tokens + tokens

    def begin(self, now: UnixTime) -> None:
        """Record that the instance was idle until now."""
        self._since = max(now, self._since)

    def serve(self, mean_s: Seconds, now: UnixTime) -> None:
        """
        Record that *mean_s* seconds of expected work were done between the previous call and *now*.
        """
        # A stall of seconds carries no information about the pace after it.
        longest_s = _STALL_S + _STALL_FACTOR * mean_s
        elapsed_s = min(longest_s, max(0.0, now - self._since))
        kept = exp(-elapsed_s / _MEMORY_S)
        self._served_s = kept * self._served_s + mean_s
        self._busy_s = kept * self._busy_s + elapsed_s
        self._since = max(now, self._since)
        pace = (self._served_s + _PRIOR_S) / (self._busy_s + _PRIOR_S)
        self.value = min(MAX_PACE, max(MIN_PACE, pace))

    def correct(self, in_engine_s: Seconds, reported_tokens: int, now: UnixTime) -> None:
        """
        Correct *in_engine_s*, the assumed work in the engine, by a report of *reported_tokens*.
        """
        reported_s = reported_tokens * self.token_s
        # Before the first request from this router, the time per token of the instance is unknown.
        is_known = reported_s > 0 or not reported_tokens
        self._correction_s = _CORRECTION_SHARE * (reported_s - in_engine_s) if is_known else 0.0
        self._corrected_at = now

    def wait_s(self, in_engine_s: Seconds, typical_s: Seconds, now: UnixTime) -> Seconds:
        """
        Time until the engine has done *in_engine_s* of expected work; at least 0.

        Args:
            in_engine_s: Work in the engine, including the completed part of its first request.
            typical_s: Work of one request.
            now: Unix seconds.
        """
        elapsed_s = now - self._since
        progress_s = min(in_engine_s, typical_s, self.value * elapsed_s)
        left_s = in_engine_s - progress_s if elapsed_s > 0 else in_engine_s
        if self._correction_s:
            age_s = max(0.0, now - self._corrected_at)
            left_s += self._correction_s * exp(-age_s / _CORRECTION_FADES_S)
        return left_s / self.value if left_s > 0 else 0.0
