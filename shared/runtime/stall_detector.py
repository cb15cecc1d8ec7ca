"""Detects stalls of this process, after which timeouts of peers must be extended."""

import time
from collections.abc import Callable

from shared.contracts.base import Seconds
from shared.runtime.events import EventLogger

log = EventLogger(__name__)
PERIOD_S = 0.1
"""Recommended interval between two calls of `missed_s`."""
STALL_S = 1.0
"""Gap between two calls that counts as a stall; shorter gaps are normal on a busy host."""
START_S = 30.0
"""
Time from the creation of a detector in which stalls are not logged: imports and first compilations
stall each process that starts, and in an embedded mesh one service stalls all others.
"""


class StallDetector:
    """
    Measures stalls of this process, e.g. on an overloaded host or after a suspension.

    During a stall, messages of peers wait unread in the sockets of this process, so the peers seem
    silent. Each stall is logged, except at the start of the process.

    Args:
        clock: Clock that continues while the process is stalled.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.time) -> None:
        self._clock = clock
        self._began_at = self._asked_at = clock()

    def missed_s(self) -> Seconds:
        """Return the stalled time since the last call in seconds; must be called continuously."""
        before, self._asked_at = self._asked_at, self._clock()
        gap_s = self._asked_at - before
        if gap_s <= STALL_S:
            return 0.0
        if before - self._began_at >= START_S:
            log.warning("service.stalled", duration_s=round(gap_s, 3))
        return gap_s
