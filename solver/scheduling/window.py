"""The window: a bounded number of pulled requests that wait for the engine, in exact order."""

import heapq
import math
from collections.abc import Iterator

from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.requests import QueuedRequest
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import PriorityKey, edf_key, rank_of

GROWTH = 0.25
"""Least expected rest of an answer, as a share of the tokens that it has so far."""


class Window:
    """
    A bounded priority queue with one heap per rank.

    Args:
        aging_bound_s: Age from which relegated and best-effort work competes with regular work.
    """

    def __init__(self, *, aging_bound_s: Seconds) -> None:
        self._aging_bound_s = aging_bound_s
        self._heaps: dict[Rank, list[PriorityKey]] = {rank: [] for rank in Rank}
        self._requests: dict[str, QueuedRequest] = {}
        self._keys: dict[str, PriorityKey] = {}
        self._counts: dict[Rank, int] = dict.fromkeys(Rank, 0)
        self.tokens = 0
        """Number of prompt and output tokens that the waiting requests are expected to need."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(tuple(self._requests.values()))

    def count(self, rank: Rank) -> int:
        """Number of waiting requests of rank *rank*."""
        return self._counts[rank]

    def add(self, request: QueuedRequest) -> None:
        """Add a request, whose id must not be in the window."""
        rank = rank_of(request)
        key = edf_key(request, aging_bound_s=self._aging_bound_s)
        heapq.heappush(self._heaps[rank], key)
        self._requests[request.request_id] = request
        self._keys[request.request_id] = key
        self._counts[rank] += 1
        self.tokens += tokens_needed(request)

    def remove(self, request_id: RequestId) -> QueuedRequest | None:
        """
        Remove and return a request; its heap entry is dropped later, when the entry reaches the
        top.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            del self._keys[request_id]
            self._counts[rank_of(request)] -= 1
            self.tokens -= tokens_needed(request)
        return request

    def peek(self, now: UnixTime) -> QueuedRequest | None:
        """
        The request to run next.

        This is the head of the first rank that has requests. The head of a later rank is chosen
        instead if its aging bound has passed and is earlier than the deadline of the first rank's
        head.
        """
        heads = {rank: self._head(rank) for rank in Rank}
        chosen: PriorityKey | None = None
        for rank in Rank:
            head = heads[rank]
            if head is None:
                continue
            aged = head.deadline_at <= now
            if chosen is None or (aged and head < chosen):
                chosen = head
        return None if chosen is None else self._requests[chosen.request_id]

    def peek_rank(self, rank: Rank) -> QueuedRequest | None:
        """The first request of one rank in the window."""
        head = self._head(rank)
        return None if head is None else self._requests[head.request_id]

    def _head(self, rank: Rank) -> PriorityKey | None:
        heap = self._heaps[rank]
        # Identity, not equality: a request that left and came back has a new entry.
        while heap and self._keys.get(heap[0].request_id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


def tokens_needed(request: QueuedRequest, *, generated: int = 0) -> int:
    """
    Number of KV tokens that a request is expected to need at the end of its answer.

    Limits of answers are often the whole context, so that rooms for limits would leave engines
    nearly empty. The rest of an answer is expected to be at least `GROWTH` of its tokens so far.

    Args:
        request: The request, with the progress of its earlier runs.
        generated: Tokens of the answer so far, if more than the progress.
    """
    so_far = max(generated, request.progress.num_tokens)
    answer = max(request.answer_tokens, so_far + math.ceil(GROWTH * so_far))
    return request.prompt_tokens + min(request.sampling.max_tokens, answer)
