"""Time, injected."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time that tests can move."""

    def now(self) -> float:
        """Unix time in seconds."""
        ...


class SystemClock:
    """The real one; the only reader of the machine's clock outside engines."""

    def now(self) -> float:
        return time.time()
