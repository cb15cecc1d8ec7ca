"""A number of instances that an autoscaler can follow both ways, without flapping."""

from collections import deque
from dataclasses import dataclass

from shared.contracts.base import Seconds, UnixTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """How many instances the present work needs."""

    least: int
    """Number below which work would be late or instances too busy."""
    kept: int
    """
    Number up to which instances are kept; at least `least`. The distance is the band in which a
    changing load changes nothing.
    """


class SteadyNumber:
    """
    Follows a need upwards at once, and downwards only after every need of some time was lower.

    The number is never below the last need's `least`, and rises with every need: larger needs never
    give a smaller number. It does not change while it is between `least` and `kept` of all needs.

    Args:
        number: The number at first, which counts as a need at *at*.
        at: Time of the first number.
        down_after_s: Time for which needs must be lower before the number falls.
    """

    def __init__(self, number: int, at: UnixTime, *, down_after_s: Seconds) -> None:
        self.number = number
        self._down_after_s = down_after_s
        self._kept: deque[tuple[UnixTime, int]] = deque([(at, number)])
        """
        Falling maxima of `kept`, each with the time from which no later need was larger; a need
        holds until the next one.
        """

    def observe(self, need: Need, at: UnixTime) -> int:
        """
        Take a need into account; return the number from now on.

        Args:
            need: The present need.
            at: Time of the need, not before the last one's.
        """
        since = at
        while self._kept and self._kept[-1][1] <= need.kept:
            since, _ = self._kept.pop()
        self._kept.append((since, need.kept))
        while len(self._kept) > 1 and self._kept[1][0] <= at - self._down_after_s:
            self._kept.popleft()
        self.number = max(need.least, min(self.number, self._kept[0][1]))
        return self.number
