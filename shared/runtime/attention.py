"""A process that stood still has not listened: others were not silent for that."""

import time
from collections.abc import Callable

import structlog

from shared.contracts.base import Seconds

log = structlog.get_logger()
PERIOD_S = 0.1
"""How often somebody who asks for it should ask."""
STALL_S = 1.0
"""Since the last time; less is how loops run on a busy host."""


class Attention:
    """
    Tells how long this process did not run, on a host that is short of time or that was suspended.

    What others said meanwhile waits in its sockets, and has yet to be read when it goes on.

    Args:
        clock: Goes on while the process stands still.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.time) -> None:
        self._clock = clock
        self._asked_at = clock()

    def missed_s(self) -> Seconds:
        """How long it stood still since this was last asked, as it is to be all the time."""
        before, self._asked_at = self._asked_at, self._clock()
        gap_s = self._asked_at - before
        if gap_s <= STALL_S:
            return 0.0
        log.warning("service.stalled", duration_s=gap_s)
        return gap_s
