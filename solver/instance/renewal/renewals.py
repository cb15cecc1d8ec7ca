"""Which held requests are due to be renewed, and which copies are under way."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shared.contracts.base import Seconds, UnixTime
from solver.instance.request import Held

FIRST_SHARE, LAST_SHARE = 0.25, 0.5
"""
Shares of the timeout after which requests are renewed. Requests that were pulled together are
spread between both, and half of the timeout remains for further attempts.
"""
RETRY_SHARE = 0.02
"""Share of the timeout until the next attempt after a failure."""
MOST_AT_ONCE = 8
"""Number of copies that are published at a time."""
_SPREAD = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio are spread evenly, however many there are."""
_LEFT_MEMORY = 20_000
"""Number of renewed requests that have left whose numbers are kept."""


@dataclass(slots=True, kw_only=True)
class Renewals:
    """Copies of held requests on their way to the instance's inbox and from there."""

    timeout_s: Seconds
    """Time for which the broker leaves a delivery unacknowledged."""
    next_at: UnixTime = math.inf
    """Time of the first renewal; nothing is due before it."""
    published: dict[int, bool] = field(default_factory=dict)
    """
    Number of a request whose copy is being published -> True if a copy has come meanwhile, which
    may precede the broker's confirm.
    """
    awaited: dict[int, UnixTime] = field(default_factory=dict)
    """Number of a request whose copy is in the inbox -> time of the broker's confirm."""
    left: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Numbers of renewed requests that have left: further copies are acknowledged."""

    @property
    def are_under_way(self) -> bool:
        """True if a copy is in the inbox, or may soon be."""
        return bool(self.published or self.awaited)

    def schedule(self, held: Held, now: UnixTime) -> None:
        """Set the time of the next renewal of a request whose oldest delivery has come now."""
        share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * (held.number * _SPREAD % 1.0)
        self._at(held, now + share * self.timeout_s)

    def retry(self, held: Held, now: UnixTime) -> None:
        """Set the time of the next attempt after a failed one."""
        self._at(held, now + RETRY_SHARE * self.timeout_s)

    def due(self, requests: Iterable[Held], now: UnixTime) -> Iterator[Held]:
        """The requests whose copies are to be published now."""
        if now < self.next_at:
            return
        self.next_at = math.inf
        for held in requests:
            if not held.tags or held.number in self.published or held.number in self.awaited:
                continue  # the broker delivers it again, or its copy is under way
            if held.renew_at > now:
                self.next_at = min(self.next_at, held.renew_at)
            elif len(self.published) < MOST_AT_ONCE:
                self.published[held.number] = False
                yield held

    def confirmed(self, number: int, now: UnixTime) -> bool:
        """Record that a copy was published; return whether it must be pulled from the inbox."""
        self.next_at = min(self.next_at, now)  # others may have waited for this one
        if self.published.pop(number, True):
            return False
        self.awaited[number] = now
        return True

    def failed(self, number: int, now: UnixTime) -> bool:
        """Record that a copy may not be published; return whether it has come nevertheless."""
        self.next_at = min(self.next_at, now)
        return self.published.pop(number, False)

    def came(self, number: int) -> None:
        """Record that a copy was pulled."""
        self.awaited.pop(number, None)
        if number in self.published:
            self.published[number] = True

    def missed(self, asked_at: UnixTime) -> set[int]:
        """Remove the copies that a pull at *asked_at* did not find; return their numbers."""
        gone = {number for number, at in self.awaited.items() if at <= asked_at}
        for number in gone:
            del self.awaited[number]
        return gone

    def left_with_copies(self, held: Held) -> None:
        """Record that a request has left for which copies were published."""
        if held.is_renewed:
            self.left[held.number] = None
            while len(self.left) > _LEFT_MEMORY:
                self.left.popitem(last=False)

    def give_up(self) -> None:
        """Wait for no more copies."""
        self.published.clear()
        self.awaited.clear()

    def _at(self, held: Held, at: UnixTime) -> None:
        held.renew_at = at
        self.next_at = min(self.next_at, at)
