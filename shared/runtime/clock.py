"""Injectable time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall clock that tests can replace."""

    def now(self) -> float:
        """Unix time in seconds."""
        ...


class SystemClock:
    """The system's wall clock; its only reader outside engines."""

    def now(self) -> float:
        return time.time()
