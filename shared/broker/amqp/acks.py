"""Acknowledgements that a channel sends together."""

from collections.abc import Callable
from dataclasses import dataclass

from shared.contracts.base import Seconds

MOST_DELAY_S: Seconds = 0.5
"""Longest time for which an acknowledgement waits for others."""


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledgement."""

    tag: int
    multiple: bool
    """True if it includes all deliveries before the tag."""


class GatheredAcks:
    """
    Acknowledgements of one channel until they are sent.

    Args:
        most: Number of acknowledgements that are sent without further delay.
        begin: Called when the first of them waits; the owner sends them `MOST_DELAY_S` later.
    """

    def __init__(self, most: int, begin: Callable[[], None]) -> None:
        self._most = most
        self._begin = begin
        self._waiting: list[int] = []
        self._last = 0
        """All deliveries up to this tag are settled; the tags of a channel count from 1."""
        self._beyond: set[int] = set()
        """Further tags that are settled."""

    def add(self, tag: int) -> bool:
        """Add the acknowledgement of *tag*; return whether to send all of them now."""
        if not self._waiting:
            self._begin()
        self._waiting.append(tag)
        self.settled(tag)
        return len(self._waiting) >= self._most

    def settled(self, tag: int) -> None:
        """Note that *tag* needs no acknowledgement of its own."""
        self._beyond.add(tag)
        while self._last + 1 in self._beyond:
            self._last += 1
            self._beyond.discard(self._last)

    def next(self) -> Ack | None:
        """The next to send; it stays until `sent`."""
        if not self._waiting:
            return None
        included = max((tag for tag in self._waiting if tag <= self._last), default=None)
        if included is not None:
            return Ack(included, multiple=True)
        return Ack(self._waiting[0], multiple=False)

    def sent(self, ack: Ack) -> None:
        """Remove what was sent; acknowledgements that were added meanwhile may be included."""
        self._waiting = [
            tag for tag in self._waiting if tag != ack.tag and not (ack.multiple and tag < ack.tag)
        ]
