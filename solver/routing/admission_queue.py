"""Requests that wait in the router for one instance (QUARTZ §4.3)."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from shared.contracts.base import InstanceId, RequestId, UnixTime
from solver.routing.request import Candidate, PrefillEstimate, RoutedRequest

_SLACK = 64
"""Number of stale items below which the heap is not rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A request and the instance that was chosen for it."""

    request: RoutedRequest
    candidate: Candidate
    """State of the chosen instance at the time of the choice."""
    estimate: PrefillEstimate
    key: float
    """
    Dispatch key of the request; determines the order of requests while predictions are trusted.
    """
    is_late: bool = False
    """True if the dispatch key already includes the penalty for being late."""

    @property
    def instance_id(self) -> InstanceId:
        return self.candidate.instance_id

    def will_be_late(self, now: UnixTime) -> bool:
        """True if the first token would be late even if the prefill began *now*."""
        return now + self.estimate.mean_s > self.request.deadline_at


_Item = tuple[float, float, int, RequestId]


class AdmissionQueue:
    """
    Queue of an instance: a binary heap by key, then arrival, then order of entry.

    Aging is part of the key, so the order of waiting requests never changes. Removal is lazy.

    Args:
        ordering: Sort key of an assignment, smaller first.
    """

    def __init__(self, ordering: Callable[[Assignment], float]) -> None:
        self._ordering = ordering
        self._heap: list[_Item] = []
        self._waiting: dict[RequestId, tuple[int, Assignment]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, assignment: Assignment) -> None:
        """Add *assignment* to the queue, which must not contain its request already."""
        self._num_pushed += 1
        request = assignment.request
        self._waiting[request.request_id] = (self._num_pushed, assignment)
        heapq.heappush(self._heap, self._item(self._num_pushed, assignment))

    def pop(self) -> Assignment | None:
        """Remove and return the first assignment; None if no request waits."""
        while self._heap:
            _, _, number, request_id = heapq.heappop(self._heap)
            found = self._waiting.get(request_id)
            if found is not None and found[0] == number:
                del self._waiting[request_id]
                return found[1]
        return None

    def discard(self, request_id: RequestId) -> bool:
        """Remove the request from the queue; return True if it was in the queue."""
        found = self._waiting.pop(request_id, None)
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self.reorder(self._ordering)
        return found is not None

    def reorder(self, ordering: Callable[[Assignment], float]) -> None:
        """Use another order from now on, also for the requests that already wait in the queue."""
        self._ordering = ordering
        self._heap = [self._item(*each) for each in self._waiting.values()]
        heapq.heapify(self._heap)

    def _item(self, number: int, assignment: Assignment) -> _Item:
        request = assignment.request
        return (self._ordering(assignment), request.arrived_at, number, request.request_id)
