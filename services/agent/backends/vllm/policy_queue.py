"""vLLM's waiting queue in the order that a policy gives anew for each iteration."""

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

from shared.contracts.base import RequestId


class PolicyQueue(RequestQueue):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Requests by id; the head is the first of the current order that still waits.

    vLLM looks at heads only and stops at the first that gets no KV, so the order is read no
    further than it admits requests.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestId, Any] = {}
        self._order: Iterator[RequestId] = iter(())
        self._head: Any = None
        self.popped: dict[RequestId, None] = {}
        """Taken since `begin`, and not put back."""

    def begin(self, order: Iterable[RequestId]) -> None:
        """Use *order* from here on."""
        self._order = iter(order)
        self._head = None
        self.popped.clear()

    def add_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def peek_request(self) -> Any:
        while self._head is None:
            request_id = next(self._order, None)
            if request_id is None:
                # Unknown to the policy: in the order of arrival here.
                request_id = next(iter(self._requests), None)
                if request_id is None:
                    raise IndexError("the queue is empty")
            self._head = self._requests.get(request_id)
        return self._head

    def pop_request(self) -> Any:
        request = self.peek_request()
        self._head = None
        del self._requests[request.request_id]
        self.popped[request.request_id] = None
        return request

    def prepend_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        self.popped.pop(request.request_id, None)

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
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._requests.values()))
