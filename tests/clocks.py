"""Clocks that only tests advance."""

from ops.sim.virtual_time import BEGIN

NOW = BEGIN


class FakeClock:
    """
    A clock that is stopped until a test advances it.

    Args:
        now: Unix seconds.
    """

    def __init__(self, now: float = NOW) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
