"""The ends of held requests, in their order."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.contracts.base import UnixTime
from shared.contracts.ends import End, has_token, nearest_end
from solver.instance.request import Held, Phase

_SLACK = 64
"""Number of entries below which the heap is not cleared of requests that have left."""


def end_of(held: Held) -> End:
    """The end of a held request, as its tokens so far determine it."""
    begun = held.run is not None and held.run.begun
    has_begun = begun or held.first_token_at is not None or has_token(held.request)
    return nearest_end(held.request, has_begun=has_begun)


@dataclass(slots=True)
class HeldEnds:
    """Ends of held requests; entries of requests that have left or have other ends are skipped."""

    _heap: list[tuple[UnixTime, int, Held]] = field(default_factory=list)
    _limit: int = _SLACK
    """Number of entries from which the heap is cleared."""

    @property
    def next_at(self) -> UnixTime:
        """Time at which a request may have reached its end; infinite without ends."""
        return self._heap[0][0] if self._heap else math.inf

    def schedule(self, held: Held) -> None:
        """Note the end of a request that was pulled or replaced by a newer copy."""
        at = end_of(held).at
        if at == math.inf:
            return
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if not _has_left(entry[2])]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SLACK
        heapq.heappush(self._heap, (at, held.number, held))

    def due(self, now: UnixTime) -> Iterator[Held]:
        """Remove and yield the requests that are past their ends; the others get their new ends."""
        while self.next_at <= now:
            held = heapq.heappop(self._heap)[2]
            if _has_left(held):
                continue
            if end_of(held).at > now:
                self.schedule(held)
            else:
                yield held


def _has_left(held: Held) -> bool:
    return held.phase in (Phase.LEAVING, Phase.GONE)
