"""Ends of the requests that one grouper has put into queues."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from shared.contracts.base import RequestId, Seconds, TenantId, UnixTime
from shared.contracts.ends import NEVER, End, end_with_tokens, nearest_end
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import HistoryEntry, QueuedRequest, StoredWork
from shared.contracts.stories.story import Story

GRACE_S: Seconds = 0.3
"""
Time after the end of a request in which the final reply of the instance that runs it, or the dead
letter of the broker, has precedence.
"""
_SLACK = 1000
"""Number of stale entries of the heap from which it is made again."""


@dataclass(slots=True, kw_only=True, eq=False)
class Watched:
    """A request with an end, as far as its final reply needs it."""

    key: str
    """Identity of the request."""
    request_id: RequestId
    tenant: TenantId
    model: str
    lane: str
    slo: Slo
    reply_to: str | None
    stored: StoredWork | None
    queue: str
    """Queue that the request was put into."""
    arrived_at: UnixTime
    grouped_at: UnixTime
    end: End
    end_with_tokens: End
    history: tuple[HistoryEntry, ...] = ()

    @property
    def qos_class(self) -> QosClass:
        return self.slo.qos_class

    @property
    def story(self) -> Story:
        """The record of the request, as far as this grouper knows it."""
        return Story(
            request_id=self.request_id,
            tenant=self.tenant,
            model=self.model,
            lane=self.lane,
            queue=self.queue,
            slo=self.slo,
            arrived_at=self.arrived_at,
            grouped_at=self.grouped_at,
            history=self.history,
        )


@dataclass(slots=True)
class WatchedEnds:
    """
    Requests in the order of their ends; it decides, and does no IO.

    Args:
        most: Maximum number of requests. Beyond it, only the broker and the instances end requests.
    """

    most: int
    _watched: dict[str, Watched] = field(default_factory=dict)
    _heap: list[tuple[UnixTime, int, Watched]] = field(default_factory=list)
    _number: int = 0

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, key: str, request: QueuedRequest, queue: str) -> bool:
        """Watch a request that is put into *queue*; return False if it never ends or if full."""
        end = nearest_end(request)
        if end.at == inf or (len(self._watched) >= self.most and key not in self._watched):
            return False
        watched = Watched(
            key=key,
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model.name,
            lane=request.lane,
            slo=request.slo,
            reply_to=request.reply_to,
            stored=request.stored,
            queue=queue,
            arrived_at=request.arrived_at,
            grouped_at=request.grouped_at,
            end=end,
            end_with_tokens=end_with_tokens(request),
            history=request.history,
        )
        self._watched[key] = watched
        self._push(watched)
        return True

    def moved(self, key: str, queue: str) -> None:
        """Record that a request was put into another queue; unknown requests are ignored."""
        if (watched := self._watched.get(key)) is not None:
            watched.queue = queue

    def begun(self, key: str) -> None:
        """Record that a request has its first token, after which it may have a later end."""
        watched = self._watched.get(key)
        if watched is None or watched.end == watched.end_with_tokens:
            return
        watched.end = watched.end_with_tokens
        if watched.end == NEVER:
            self.remove(key)
        else:
            self._push(watched)

    def remove(self, key: str) -> None:
        """Forget a request that has ended; unknown requests are ignored."""
        self._watched.pop(key, None)
        if len(self._heap) > 2 * len(self._watched) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def due(self, now: UnixTime) -> Iterator[Watched]:
        """Remove and yield the requests that are past their ends and the grace."""
        while self._heap and self._heap[0][0] + GRACE_S <= now:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                watched = entry[2]
                del self._watched[watched.key]
                yield watched

    def restore(self, watched: Watched) -> None:
        """Watch a request again whose final reply could not be sent."""
        if watched.key not in self._watched:
            self._watched[watched.key] = watched
            self._push(watched)

    def _push(self, watched: Watched) -> None:
        self._number += 1
        heapq.heappush(self._heap, (watched.end.at, self._number, watched))

    def _is_current(self, entry: tuple[UnixTime, int, Watched]) -> bool:
        at, _, watched = entry
        return self._watched.get(watched.key) is watched and watched.end.at == at
