"""Factor by which recent requests take longer than predicted, in all regimes together."""

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 128
"""
Latest requests that the median is of: half of them decide, so a change is followed within 64. With
fewer, a change would be followed before wrong predictions are detected, and the median itself would
err more.
"""
_LEAST = 16
"""Requests below which a median describes these requests rather than the engines."""


class Pace:
    """Median of the latest scores; before there are enough, the start value, if any."""

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._start: float | None = None

    def start_at(self, value: float) -> None:
        """Use the pace of other routers until enough was observed here."""
        self._start = value

    def observe(self, score: float) -> None:
        """Add one request's logarithm of actual time over predicted time."""
        self._window.append(score)
        insort(self._sorted, score)
        if len(self._window) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]

    @property
    def value(self) -> float | None:
        """Logarithm of the factor by which requests take longer than predicted."""
        if len(self._sorted) < _LEAST:
            return self._start
        return self._sorted[len(self._sorted) // 2]
