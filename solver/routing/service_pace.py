"""Rate at which one instance works through expected work, and its progress (QUARTZ §4.4)."""

from math import exp

from shared.contracts.base import Seconds, UnixTime

MIN_PACE, MAX_PACE = 0.25, 4.0
"""Batching serves several prefills at once; a pace beyond these comes from a fault elsewhere."""
_MEMORY_S = 20.0
_PRIOR_S = 1.0
"""Weight of a pace of 1, in seconds of service."""
_CORRECTION_SHARE = 0.5
"""Applied share of the difference to a report: reports are late, totals lack others' work."""
_CORRECTION_FADES_S = 1.0
"""Time constant with which a correction fades: reports come each second."""
_STALL_S, _STALL_FACTOR = 1.0, 10.0
"""Longer service than this, plus that many times the expected one, counts as a stall."""
_KEPT = 1 - 1 / 256
"""Decay of the time per token with each request, because engines change."""


class ServicePace:
    """
    Recent service of one instance.

    Decided: the pace is expected work per second of service. It may be above 1, because several
    prefills share iterations under continuous batching. Without a report or a first token, an
    instance is assumed to progress by at most one typical request.
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
        """Expected seconds of work per second; only this class writes it."""

    @property
    def token_s(self) -> Seconds:
        """Expected work per token over the last hundreds of requests; 0 before the first."""
        return self._added_s / self._added_tokens if self._added_tokens else 0.0

    def add(self, mean_s: Seconds, tokens: int) -> None:
        """Add expected work of *mean_s* for *tokens*."""
        self._added_s = _KEPT * self._added_s + mean_s
        self._added_tokens = _KEPT * self._added_tokens + tokens

    def begin(self, now: UnixTime) -> None:
        """Record that the instance was idle until now."""
        self._since = max(now, self._since)

    def serve(self, mean_s: Seconds, now: UnixTime) -> None:
        """Record the end of *mean_s* of work, the first event since the previous one."""
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
        """Correct the assumed *in_engine_s* of work by the reported *reported_tokens*."""
        reported_s = reported_tokens * self.token_s
        # The time of a token there is unknown before the first request from here.
        knows = reported_s > 0 or not reported_tokens
        self._correction_s = _CORRECTION_SHARE * (reported_s - in_engine_s) if knows else 0.0
        self._corrected_at = now

    def wait_s(self, in_engine_s: Seconds, typical_s: Seconds, now: UnixTime) -> Seconds:
        """
        Time until the engine has done *in_engine_s* of expected work; at least 0.

        Args:
            in_engine_s: Work given to it, including the completed part of the first request.
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
