"""Detection of high load and of overload inside the engine (QoServe §3.4)."""

from shared.contracts.base import Seconds


class LoadLevel:
    """
    A binary state with hysteresis: on above *on_s* seconds of waiting work, off again below
    *off_s*.

    Decided: QoServe distinguishes low and high load without giving bounds.
    """

    def __init__(self, *, on_s: Seconds, off_s: Seconds) -> None:
        self._on_s = on_s
        self._off_s = off_s
        self.is_on = False
        """True while the load is high; only this class writes it."""

    def observe(self, backlog_s: Seconds) -> None:
        """Update the state by the predicted duration of the waiting work, *backlog_s* seconds."""
        if backlog_s > self._on_s:
            self.is_on = True
        elif backlog_s < self._off_s:
            self.is_on = False
