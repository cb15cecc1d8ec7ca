"""Detects stalls of this process, after which timeouts of peers must be extended."""

import time
from collections.abc import Callable

import structlog

from shared.contracts.base import Seconds

log = structlog.get_logger()
PERIOD_S = 0.1
"""Recommended interval between two calls of `missed_s`."""
STALL_S = 1.0
"""Gap between two calls that counts as a stall; shorter gaps are normal on a busy host."""


class StallDetector:
    """
    Measures stalls of this process, e.g. on an overloaded host or after a suspension.

    During a stall, messages of peers wait unread in the sockets of this process, so the peers seem
    silent.

    Args:
        clock: Clock that continues while the process is stalled.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.time) -> None:
        self._clock = clock
        self._asked_at = clock()

    def missed_s(self) -> Seconds:
        """Return the stalled time since the last call in seconds; must be called continuously."""
        before, self._asked_at = self._asked_at, self._clock()
        gap_s = self._asked_at - before
        if gap_s <= STALL_S:
            return 0.0
        log.warning("service.stalled", duration_s=gap_s)
        return gap_s
