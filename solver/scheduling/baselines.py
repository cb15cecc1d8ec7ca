"""Scheduling without prediction: a fixed chunk size and a fixed order, such as FCFS or EDF."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from shared.contracts.base import RequestId, UnixTime
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)

SortKey = tuple[float, ...]


class FixedChunk:
    """
    Policy with a fixed token budget, and a key for each request that is fixed when it arrives.

    Requests with equal keys keep the order in which they reached the engine. A preempted request
    gets its old place back.

    Args:
        token_budget: Tokens per iteration (the chunk size of Sarathi-Serve).
        key: Sort key of a request; smaller is served first.
    """

    def __init__(self, token_budget: int, key: Callable[[RequestView], SortKey]) -> None:
        self._token_budget = token_budget
        self._key = key
        self._num_added = 0
        self._places: dict[RequestId, SortKey] = {}
        # The list is sorted. Insertion and removal move pointers, which takes microseconds for
        # 10,000 requests.
        self._waiting: list[tuple[SortKey, RequestId]] = []

    def add(self, request: RequestView) -> None:
        self._num_added += 1
        self._places[request.request_id] = (*self._key(request), self._num_added)
        self._wait(request.request_id)

    def remove(
        self,
        request_id: RequestId,
        answer_tokens: int | None = None,  # noqa: ARG002 - protocol
    ) -> None:
        if request_id in self._places:
            self._stop_waiting(request_id)
            del self._places[request_id]

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:  # noqa: ARG002 - protocol
        for request_id in outcome.preempted:
            self._wait(request_id)
        for request_id in outcome.admitted:
            self._stop_waiting(request_id)

    def decide(
        self,
        now: UnixTime,  # noqa: ARG002 - protocol
        batch: BatchState,
    ) -> IterationDecision:
        return IterationDecision(
            order=self._in_order(),
            token_budget=max(1, min(self._token_budget, batch.max_budget_tokens)),
        )

    def _in_order(self) -> Iterator[RequestId]:
        return (request_id for _, request_id in self._waiting)

    def _wait(self, request_id: RequestId) -> None:
        insort(self._waiting, (self._places[request_id], request_id))

    def _stop_waiting(self, request_id: RequestId) -> None:
        entry = (self._places[request_id], request_id)
        index = bisect_left(self._waiting, entry)
        if index < len(self._waiting) and self._waiting[index] == entry:
            del self._waiting[index]


class FixedChunkFcfs(FixedChunk):
    """First come, first served, by arrival at the mesh; vLLM's default order."""

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget, lambda request: (request.arrived_at,))


class FixedChunkEdf(FixedChunk):
    """Earliest planning deadline first, best effort last, ties by arrival."""

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget, lambda request: (request.deadline_at, request.arrived_at))


class FixedChunkSrpf(FixedChunk):
    """
    Shortest remaining prefill first (QoServe §4.2).

    Differs: a prefill that has begun continues, so the remaining prefill of a waiting request is
    its whole prompt.
    """

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget, lambda request: (request.prompt_tokens, request.arrived_at))


class FixedChunkSjf(FixedChunk):
    """
    Shortest job first: prompt plus longest possible answer.

    Differs: the length of an answer is unknown, so the request's limit is used.
    """

    def __init__(self, token_budget: int) -> None:
        super().__init__(
            token_budget,
            lambda request: (request.prompt_tokens + request.max_tokens, request.arrived_at),
        )
