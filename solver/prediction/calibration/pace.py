"""Factor by which recent requests of all regimes take longer than predicted."""

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 128
"""
Number of latest requests over which the median is computed.

Half of the window decides the median, so it follows a change within 64 requests. With a shorter
window, the median would follow before wrong predictions are detected, and would itself have a
larger error.
"""
_LEAST = 16
"""
Least number of requests for a median; with fewer requests, the median depends on single requests.
"""


class Pace:
    """
    Median of the latest scores; the start value, if there is one, until there are enough scores.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._start: float | None = None

    def start_at(self, value: float) -> None:
        """Use the pace of other routers until this router has observed enough requests."""
        self._start = value

    def observe(self, score: float) -> None:
        """Add the logarithm of a request's actual time over its predicted time."""
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
