"""vLLM's queue of waiting requests, in the order that a policy computes for each iteration."""

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

from shared.contracts.base import RequestId


class PolicyQueue(RequestQueue):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Waiting requests by id; the head is the first request in the current order that still waits.

    vLLM reads only heads and stops at the first request that gets no KV, so it never reads the
    whole order. After the last request in the order, the queue is false in a boolean context even
    if it still holds requests, because the policy does not start those requests now.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestId, Any] = {}
        self._order: Iterator[RequestId] = iter(())
        self._head: Any = None

    def begin(self, order: Iterable[RequestId]) -> None:
        """Set the order in which the waiting requests are offered to vLLM."""
        self._order = iter(order)
        self._head = None

    def add_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def peek_request(self) -> Any:
        if not self:
            raise IndexError("the queue is empty")
        return self._head

    def pop_request(self) -> Any:
        request = self.peek_request()
        self._head = None
        del self._requests[request.request_id]
        return request

    def prepend_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        del self._requests[request.request_id]
        if self._head is request:
            self._head = None

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if request.request_id in self._requests:
                self.remove_request(request)

    def __bool__(self) -> bool:
        while self._head is None:
            request_id = next(self._order, None)
            if request_id is None:
                return False
            self._head = self._requests.get(request_id)
        return True

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._requests.values()))
