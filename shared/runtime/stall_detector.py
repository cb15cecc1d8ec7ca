"""Detection of stalls, so that peers are not declared dead for messages that were not yet read."""

import time
from collections.abc import Callable

import structlog

from shared.contracts.base import Seconds

log = structlog.get_logger()
PERIOD_S = 0.1
"""Recommended interval between calls."""
STALL_S = 1.0
"""Gap since the last call that counts as a stall; shorter gaps are normal on a busy host."""


class StallDetector:
    """
    Measures stalls of this process, on an overloaded host or after a suspension.

    Messages that peers sent during a stall wait in the sockets of this process and are read after
    it.

    Args:
        clock: Keeps running while the process is stalled.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.time) -> None:
        self._clock = clock
        self._asked_at = clock()

    def missed_s(self) -> Seconds:
        """Return the stalled time since the last call, in seconds; must be called continuously."""
        before, self._asked_at = self._asked_at, self._clock()
        gap_s = self._asked_at - before
        if gap_s <= STALL_S:
            return 0.0
        log.warning("service.stalled", duration_s=gap_s)
        return gap_s
