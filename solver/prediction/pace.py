"""By how much requests lately take longer than predicted, whatever their regime."""

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 128
"""Requests: half of them decide, so a change is followed within 64. With fewer it would be over
before anybody could tell that predictions were wrong, and a median of fewer errs more itself."""
_LEAST = 16
"""Requests before which a median says more of them than of the engines."""


class Pace:
    """Median of the latest scores; before there are enough, none, or where it started."""

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._start: float | None = None

    def start_at(self, value: float) -> None:
        """Others' pace, until enough was observed here."""
        self._start = value

    def observe(self, score: float) -> None:
        """One request's logarithm of realised time as a multiple of the predicted one."""
        self._window.append(score)
        insort(self._sorted, score)
        if len(self._window) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]

    @property
    def value(self) -> float | None:
        """Logarithm of the factor."""
        if len(self._sorted) < _LEAST:
            return self._start
        return self._sorted[len(self._sorted) // 2]
