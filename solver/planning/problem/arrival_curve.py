"""Cumulative arrivals of one lane over time, in a bounded number of points."""

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts.base import UnixTime

MAX_POINTS = 32
_MARK_S = 0.1
_MARKS = 150
"""
Maximum number of time marks for recent arrivals; together, the marks cover fifteen seconds or more.
"""


@dataclass(slots=True)
class ArrivalCurve:
    """
    Cumulative arrivals of one lane in a bounded number of points; the total is exact.

    Arrivals between two points are assumed to be evenly spaced. When there are too many points,
    every second one of the older points is dropped: the newest requests, which still wait, stay
    exact.
    """

    max_points: int = MAX_POINTS
    _points: list[tuple[UnixTime, int]] = field(default_factory=list)

    def add(self, at: UnixTime) -> None:
        """Add one request, which must not arrive earlier than the last added request."""
        total = self.total + 1
        if self._points and at <= self._points[-1][0]:
            self._points[-1] = (self._points[-1][0], total)
            return
        self._points.append((at, total))
        if len(self._points) > self.max_points:
            older = self._points[: self.max_points // 2]
            self._points = [*older[:1], *older[1::2], *self._points[len(older) :]]

    @property
    def total(self) -> int:
        return self._points[-1][1] if self._points else 0

    def points(self) -> tuple[tuple[UnixTime, int], ...]:
        """Points (time, cumulative requests), both rising."""
        return tuple(self._points)


@dataclass(slots=True)
class RecentArrivals:
    """
    Counts of the requests that arrived since each of several recent times.

    Marks are at least `_MARK_S` apart. A burst begins a new mark and is counted whole, while
    `ArrivalCurve` would spread it over the pause before the burst.
    """

    total: int = 0
    _marks: deque[tuple[UnixTime, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))
    """Marks (time, number of earlier requests), both rising."""

    def add(self, at: UnixTime) -> None:
        """Add one request, which must not arrive earlier than the last added request."""
        if not self._marks or at - self._marks[-1][0] >= _MARK_S:
            self._marks.append((at, self.total))
        self.total += 1

    def after(self, at: UnixTime) -> list[tuple[UnixTime, int]]:
        """
        Pairs (time, number of requests since this time) for each mark after *at*, in order of time.

        Every request after *at* is counted, as long as marks reach back to *at*. If a mark began
        just before *at*, its requests except the first are counted as if they had come at *at*.
        """
        found = [(time, self.total - before) for time, before in self._marks if time > at]
        most = found[0][1] if found else 0
        around = (before for time, before in self._marks if time <= at < time + _MARK_S)
        others = self.total - next(around, self.total) - 1
        return [(at, others), *found] if others > most else found


def merged(curves: Iterable[Sequence[tuple[UnixTime, int]]]) -> list[tuple[UnixTime, float]]:
    """Sum of the arrival curves that several groupers recorded for one lane."""
    curves = [curve for curve in curves if curve]
    times = sorted({at for curve in curves for at, _ in curve})
    return [(at, sum(_count_at(curve, at) for curve in curves)) for at in times]


def enqueued_at(curve: Sequence[tuple[UnixTime, float]], rank: float) -> UnixTime:
    """
    Arrival time of request number *rank*; the newest request has number 1.

    Args:
        curve: Result of `merged`, not empty.
        rank: 1 or more; a rank beyond the first request gives the time of the first.
    """
    count = max(curve[0][1], curve[-1][1] - rank + 1)
    index = bisect.bisect_left(curve, count, key=lambda point: point[1])
    if index == 0:
        return curve[0][0]
    (from_at, from_total), (to_at, to_total) = curve[index - 1], curve[index]
    return from_at + (to_at - from_at) * (count - from_total) / (to_total - from_total)


def arrived_since(curve: Sequence[tuple[UnixTime, float]], at: UnixTime) -> float:
    """
    Number of requests that arrived after the time *at*.

    Args:
        curve: Result of `ArrivalCurve.points` or `merged`; may be empty.
    """
    return curve[-1][1] - _count_at(curve, at) if curve else 0.0


def _count_at(curve: Sequence[tuple[UnixTime, float]], at: UnixTime) -> float:
    index = bisect.bisect_right(curve, at, key=lambda point: point[0])
    if index == 0:
        return 0.0
    if index == len(curve):
        return float(curve[-1][1])
    (from_at, from_total), (to_at, to_total) = curve[index - 1], curve[index]
    return from_total + (to_total - from_total) * (at - from_at) / (to_at - from_at)
