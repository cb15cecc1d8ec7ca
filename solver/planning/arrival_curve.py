"""How many requests had come to a lane by when, in a bounded number of points."""

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts.base import UnixTime

MAX_POINTS = 32
_MARK_S = 0.1
_MARKS = 150
"""Fifteen seconds and more."""


@dataclass(slots=True)
class ArrivalCurve:
    """
    Cumulative arrivals, thinned as they grow; exact about their number.

    Between two points requests are taken to have come evenly. Thinning halves the older points,
    so the newest stay dense: they are the ones that wait.
    """

    max_points: int = MAX_POINTS
    _points: list[tuple[UnixTime, int]] = field(default_factory=list)

    def add(self, at: UnixTime) -> None:
        """One more request, not before the last one."""
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
        """(time, requests until then), both rising."""
        return tuple(self._points)


@dataclass(slots=True)
class RecentArrivals:
    """
    How many requests have come since times not long ago.

    Marks are `_MARK_S` apart, so that a burst is counted whole however sudden it is, which a
    thinned curve spreads over the pause before it.
    """

    total: int = 0
    _marks: deque[tuple[UnixTime, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))
    """(time, requests before it), rising."""

    def add(self, at: UnixTime) -> None:
        """One more request, not before the last one."""
        if not self._marks or at - self._marks[-1][0] >= _MARK_S:
            self._marks.append((at, self.total))
        self.total += 1

    def after(self, at: UnixTime) -> list[tuple[UnixTime, int]]:
        """
        (time, requests since then) of each mark after *at*, the first having the most.

        None is missing that came after *at*: the others of a mark whose first came just before it
        count, too, as if they had come then. Of the time that marks are kept for, if that is less.
        """
        found = [(time, self.total - before) for time, before in self._marks if time > at]
        most = found[0][1] if found else 0
        around = (before for time, before in self._marks if time <= at < time + _MARK_S)
        others = self.total - next(around, self.total) - 1
        return [(at, others), *found] if others > most else found


def merged(curves: Iterable[Sequence[tuple[UnixTime, int]]]) -> list[tuple[UnixTime, float]]:
    """The curve of all that came to one lane through several groupers."""
    curves = [curve for curve in curves if curve]
    times = sorted({at for curve in curves for at, _ in curve})
    return [(at, sum(_count_at(curve, at) for curve in curves)) for at in times]


def enqueued_at(curve: Sequence[tuple[UnixTime, float]], rank: float) -> UnixTime:
    """
    When the request number *rank*, counted from the newest as 1, came.

    Args:
        curve: Not empty; of `merged`.
        rank: From 1; beyond the first request it is taken to have come with that.
    """
    count = max(curve[0][1], curve[-1][1] - rank + 1)
    index = bisect.bisect_left(curve, count, key=lambda point: point[1])
    if index == 0:
        return curve[0][0]
    (from_at, from_total), (to_at, to_total) = curve[index - 1], curve[index]
    return from_at + (to_at - from_at) * (count - from_total) / (to_total - from_total)


def arrived_since(curve: Sequence[tuple[UnixTime, float]], at: UnixTime) -> float:
    """Requests that came after *at*; of `ArrivalCurve.points` or `merged`, maybe empty."""
    return curve[-1][1] - _count_at(curve, at) if curve else 0.0


def _count_at(curve: Sequence[tuple[UnixTime, float]], at: UnixTime) -> float:
    index = bisect.bisect_right(curve, at, key=lambda point: point[0])
    if index == 0:
        return 0.0
    if index == len(curve):
        return float(curve[-1][1])
    (from_at, from_total), (to_at, to_total) = curve[index - 1], curve[index]
    return from_total + (to_total - from_total) * (at - from_at) / (to_at - from_at)
