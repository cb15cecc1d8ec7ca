"""The window: pulled requests waiting for the engine, ordered exactly, bounded."""

import heapq
from collections.abc import Iterator

from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.requests import QueuedRequest
from solver.scheduling.keys import PriorityKey, Tier, edf_key, tier_of


class Window:
    """
    A bounded priority queue with one heap per service tier.

    Args:
        aging_bound_s: Age at which relegated and best-effort work competes with the reachable.
    """

    def __init__(self, *, aging_bound_s: Seconds) -> None:
        self._aging_bound_s = aging_bound_s
        self._heaps: dict[Tier, list[PriorityKey]] = {tier: [] for tier in Tier}
        self._requests: dict[str, QueuedRequest] = {}
        self._keys: dict[str, PriorityKey] = {}
        self._counts: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.tokens = 0
        """Prompt and output tokens that the waiting requests may need."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(tuple(self._requests.values()))

    def count(self, tier: Tier) -> int:
        """Waiting requests of *tier*."""
        return self._counts[tier]

    def add(self, request: QueuedRequest) -> None:
        """Add a request whose id is not in the window."""
        tier = tier_of(request)
        key = edf_key(request, aging_bound_s=self._aging_bound_s)
        heapq.heappush(self._heaps[tier], key)
        self._requests[request.request_id] = request
        self._keys[request.request_id] = key
        self._counts[tier] += 1
        self.tokens += tokens_needed(request)

    def remove(self, request_id: RequestId) -> QueuedRequest | None:
        """Take one out, wherever it stands; its heap entry is dropped when it surfaces."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            del self._keys[request_id]
            self._counts[tier_of(request)] -= 1
            self.tokens -= tokens_needed(request)
        return request

    def peek(self, now: UnixTime) -> QueuedRequest | None:
        """
        The request to run next.

        The first tier that has one, unless a later tier's head has reached its aging bound and
        its bound lies before the first tier's deadline.
        """
        heads = {tier: self._head(tier) for tier in Tier}
        chosen: PriorityKey | None = None
        for tier in Tier:
            head = heads[tier]
            if head is None:
                continue
            aged = head.deadline_at <= now
            if chosen is None or (aged and head < chosen):
                chosen = head
        return None if chosen is None else self._requests[chosen.request_id]

    def peek_tier(self, tier: Tier) -> QueuedRequest | None:
        """The head of one tier."""
        head = self._head(tier)
        return None if head is None else self._requests[head.request_id]

    def _head(self, tier: Tier) -> PriorityKey | None:
        heap = self._heaps[tier]
        # Identity, not equality: the entry of a request that left and came back is another.
        while heap and self._keys.get(heap[0].request_id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


def tokens_needed(request: QueuedRequest) -> int:
    """KV tokens that the request holds at its end, at most."""
    return request.prompt_tokens + request.sampling.max_tokens
