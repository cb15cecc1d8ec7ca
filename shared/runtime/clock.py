"""Clocks that tests can replace."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall clock that tests can replace."""

    def now(self) -> float:
        """Unix time in seconds."""
        ...


class SystemClock:
    """The system's wall clock. Apart from engines, only this class reads it."""

    def now(self) -> float:
        return time.time()
