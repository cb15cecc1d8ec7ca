"""Eager relegation inside the engine, and when an engine is overloaded (QoServe §3.4)."""

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.entry import Entry


def will_violate(
    entry: Entry, *, now: UnixTime, prefill_tokens: int, token_s: Seconds, decode_s: Seconds
) -> bool:
    """
    Whether a request that is served next will miss its deadline all the same.

    Args:
        entry: Regular, not yet decoding.
        now: When it would be served.
        prefill_tokens: Left to prefill.
        token_s: Engine time per prefill token at present.
        decode_s: Time of one decode at present.

    Source: QoServe §3.4, algorithm 1 line 12.
    Decided: looks ahead to the completion of the prefill (and of the expected answer where the
    deadline is the answer's), not only to the end of the current iteration: what cannot finish
    in time is given up before it has cost anything.
    """
    finish_at = now + prefill_tokens * token_s
    if entry.qos_class is QosClass.NON_INTERACTIVE:
        finish_at += entry.decode_tokens * decode_s
    return finish_at > entry.deadline_at


class LoadLevel:
    """
    A switch with hysteresis: on from *on_s* of waiting work, off below *off_s*.

    Differs: QoServe names low and high load without giving bounds.
    """

    def __init__(self, *, on_s: Seconds, off_s: Seconds) -> None:
        self._on_s = on_s
        self._off_s = off_s
        self.is_on = False

    def observe(self, backlog_s: Seconds) -> None:
        """The waiting work takes *backlog_s* at present."""
        if backlog_s > self._on_s:
            self.is_on = True
        elif backlog_s < self._off_s:
            self.is_on = False
