"""The window: a bounded number of pulled requests that wait for the engine, in exact order."""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.qos import Importance
from shared.contracts.requests import QueuedRequest
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import PriorityKey, edf_key

GROWTH = 0.25
"""Least expected rest of an answer, as a share of the tokens that it has so far."""
_SLACK = 64
"""Number of stale keys that a heap may hold before it is rebuilt."""
_NO_KEYS: Mapping[Importance, PriorityKey] = MappingProxyType({})


class Window:
    """
    A bounded priority queue with one heap per rank and importance.

    Args:
        aging_bound_s: Age from which relegated and best-effort work competes with regular work.
    """

    def __init__(self, *, aging_bound_s: Seconds) -> None:
        self._aging_bound_s = aging_bound_s
        self._heaps: dict[tuple[Rank, Importance], list[PriorityKey]] = {
            (rank, importance): [] for rank in Rank for importance in Importance
        }
        self._requests: dict[str, QueuedRequest] = {}
        self._keys: dict[str, PriorityKey] = {}
        self._ranks: dict[str, Rank] = {}
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

    def add(self, request: QueuedRequest, rank: Rank) -> None:
        """Add a request, whose id must not be in the window."""
        key = edf_key(request, rank, aging_bound_s=self._aging_bound_s)
        heap = self._heaps[rank, request.importance]
        heapq.heappush(heap, key)
        self._requests[request.request_id] = request
        self._keys[request.request_id] = key
        self._ranks[request.request_id] = rank
        self._counts[rank] += 1
        self.tokens += tokens_needed(request)
        if len(heap) > 2 * len(self._requests) + _SLACK:
            heap[:] = [each for each in heap if self._is_current(each)]
            heapq.heapify(heap)

    def remove(self, request_id: RequestId) -> QueuedRequest | None:
        """
        Remove and return a request; its key stays in the heap until it reaches the top or the heap
        is rebuilt.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            del self._keys[request_id]
            self._counts[self._ranks.pop(request_id)] -= 1
            self.tokens -= tokens_needed(request)
        return request

    def peek(self, now: UnixTime, *, unimportant_delay_s: Seconds = 0.0) -> QueuedRequest | None:
        """
        The request to run next.

        This is the head of the first rank that has requests. The head of a later rank is chosen
        instead if its aging bound has passed and is earlier than the deadline of the first rank's
        head.

        Args:
            now: Unix seconds.
            unimportant_delay_s: As in `peek_rank`.
        """
        chosen = _chosen((self._head(rank, unimportant_delay_s) for rank in Rank), now)
        return None if chosen is None else self._requests[chosen.request_id]

    def would_be_first(
        self,
        request: QueuedRequest,
        rank: Rank,
        now: UnixTime,
        *,
        unimportant_delay_s: Seconds = 0.0,
    ) -> bool:
        """
        Return whether a request that is not in the window would be the next to run in it.

        Args:
            request: The request.
            rank: Its rank.
            now: Unix seconds.
            unimportant_delay_s: As in `peek_rank`.
        """
        key = edf_key(request, rank, aging_bound_s=self._aging_bound_s)
        heads = (
            self._head(
                each, unimportant_delay_s, {request.importance: key} if each is rank else _NO_KEYS
            )
            for each in Rank
        )
        chosen = _chosen(heads, now)
        return chosen is not None and chosen.request_id == request.request_id

    def peek_rank(self, rank: Rank, *, unimportant_delay_s: Seconds = 0.0) -> QueuedRequest | None:
        """
        The first request of one rank in the window.

        Args:
            rank: The rank.
            unimportant_delay_s: Delay of regular requests of low importance.
        """
        head = self._head(rank, unimportant_delay_s)
        return None if head is None else self._requests[head.request_id]

    def _head(
        self,
        rank: Rank,
        unimportant_delay_s: Seconds,
        joining: Mapping[Importance, PriorityKey] = _NO_KEYS,
    ) -> PriorityKey | None:
        """Key of the first request of a rank, if the keys *joining* were in the window also."""
        important, unimportant = (
            _earlier(self._first(self._heaps[rank, each]), joining.get(each))
            for each in (Importance.HIGH, Importance.LOW)
        )
        if important is None or unimportant is None:
            return important or unimportant
        delay_s = unimportant_delay_s if rank is Rank.REGULAR else 0.0
        due_at = unimportant.deadline_at + delay_s
        return min(important, unimportant._replace(deadline_at=due_at))

    def _first(self, heap: list[PriorityKey]) -> PriorityKey | None:
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _is_current(self, key: PriorityKey) -> bool:
        # Identity, not equality: a request that left and came back has a new key.
        return self._keys.get(key.request_id) is key


def _chosen(heads: Iterable[PriorityKey | None], now: UnixTime) -> PriorityKey | None:
    """The key of the request to run next, of the first keys of all ranks in their order."""
    chosen: PriorityKey | None = None
    for head in heads:
        if head is not None and (chosen is None or (head.deadline_at <= now and head < chosen)):
            chosen = head
    return chosen


def _earlier(one: PriorityKey | None, other: PriorityKey | None) -> PriorityKey | None:
    return min(one, other) if one is not None and other is not None else one or other


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
