"""How fast the lines of a batch are published: engines are kept busy, and queues stay short."""

from collections import deque
from dataclasses import dataclass

from shared.contracts.base import Seconds, UnixTime

WINDOW_S: Seconds = 10.0
"""Time over which the rate of starts is measured."""
BEHIND = 0.8
"""Share of the rate of starts from which the rate that the window needs counts as too high."""
MARGIN, LEAST_MARGIN_S, MOST_MARGIN_S = 0.1, 1.0, 600.0
"""Part of the window, and its limits, that is left for the results after the lines' deadline."""


def due_at(begins_at: UnixTime, ends_at: UnixTime, now: UnixTime) -> UnixTime:
    """
    Deadline of a line that is published *now*, before the end of the window.

    Args:
        begins_at: Begin of the batch's window.
        ends_at: End of the window, which is later than *now*.
        now: Unix time in seconds.

    Returns:
        A time before the end, so that the results are written in time; the end itself once that
        time is near.
    """
    margin_s = min(MOST_MARGIN_S, max(LEAST_MARGIN_S, MARGIN * (ends_at - begins_at)))
    due = ends_at - margin_s
    return due if due > now + LEAST_MARGIN_S else ends_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceLimits:
    """Bounds of the lines of one batch that are published and have not ended."""

    min_waiting: int
    """Lines that may wait for an engine in any case."""
    max_waiting: int
    max_outstanding: int
    """Lines that may wait or run."""
    lead_s: Seconds
    """Time for which waiting lines should suffice at the rate of starts."""


class Pace:
    """
    The pace of one batch.

    Lines wait in the mesh for about `lead_s`; running lines do not count, as the engines determine
    their number. While the window is too short for the present rate, more lines wait, so that the
    planner counts their work. A refusal limits the lines in the mesh to those that were admitted;
    then the limit grows slowly, as long as nothing is refused.

    Args:
        limits: Bounds.
    """

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._starts: deque[tuple[UnixTime, int]] = deque()
        self._admitted: int | None = None
        self._refused_at: UnixTime = 0.0
        self._paused_until: UnixTime = 0.0

    def observe(self, num_started: int, now: UnixTime) -> None:
        """Record how many lines have started or ended so far."""
        self._starts.append((now, num_started))
        while len(self._starts) > 1 and self._starts[1][0] <= now - WINDOW_S:
            self._starts.popleft()

    def refused(self, *, admitted: int, retry_after_s: Seconds, now: UnixTime) -> None:
        """
        Record that lines were refused for the tenant's limits or for load.

        Args:
            admitted: Number of lines that are in the mesh nevertheless.
            retry_after_s: Time after which lines may be admitted again.
            now: Unix time in seconds.
        """
        self._admitted = max(1, admitted)
        self._refused_at = now
        self._paused_until = max(self._paused_until, now + retry_after_s)

    def rate_per_s(self) -> float:
        """Starts in a second over the last `WINDOW_S`."""
        if len(self._starts) < 2:  # noqa: PLR2004 - a rate needs two points
            return 0.0
        (first_at, first), (last_at, last) = self._starts[0], self._starts[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def allowance(
        self,
        *,
        waiting: int,
        outstanding: int,
        left: int,
        time_left_s: Seconds,
        now: UnixTime,
    ) -> int:
        """
        Number of lines that may be published now.

        Args:
            waiting: Lines that were published and have not started.
            outstanding: Lines that were published and have not ended.
            left: Lines that have not ended, published or not.
            time_left_s: Time until the lines' deadline.
            now: Unix time in seconds.
        """
        if now < self._paused_until:
            return 0
        limits, rate = self._limits, self.rate_per_s()
        is_behind = left > BEHIND * rate * max(0.0, time_left_s)
        wanted = limits.max_waiting if is_behind and rate else rate * limits.lead_s
        bounded = min(limits.max_waiting, max(limits.min_waiting, int(wanted)))
        room = min(bounded - waiting, self._most(now) - outstanding)
        return max(0, min(room, left - outstanding))

    def _most(self, now: UnixTime) -> int:
        """Limit of the lines in the mesh."""
        if self._admitted is None:
            return self._limits.max_outstanding
        growth_per_s = max(1.0, 0.05 * self._admitted)
        grown = self._admitted + int((now - self._refused_at) * growth_per_s)
        return min(self._limits.max_outstanding, grown)
