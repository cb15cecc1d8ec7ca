"""Detection of high load and of overload inside the engine (QoServe §3.4)."""

from shared.contracts.base import Seconds


class LoadLevel:
    """
    A binary state with hysteresis: on from *on_s* seconds of waiting work, off again below *off_s*.

    Differs: QoServe names low and high load without giving bounds.
    """

    def __init__(self, *, on_s: Seconds, off_s: Seconds) -> None:
        self._on_s = on_s
        self._off_s = off_s
        self.is_on = False

    def observe(self, backlog_s: Seconds) -> None:
        """Update whether the engine is overloaded, when its waiting work takes *backlog_s*."""
        if backlog_s > self._on_s:
            self.is_on = True
        elif backlog_s < self._off_s:
            self.is_on = False
