"""What a producer remembers of requests that are over."""

from collections import OrderedDict

from shared.contracts.base import RequestId
from shared.contracts.control import StopReason


class FinishedRequests:
    """
    The most recent finished ids and what to answer their late runs with.

    Args:
        capacity: Ids to remember; the least recently used is forgotten first.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._reasons: OrderedDict[RequestId, StopReason] = OrderedDict()
        self._capacity = capacity

    def add(self, request_id: RequestId, reason: StopReason) -> None:
        """Remember that a request is over."""
        self._reasons[request_id] = reason
        self._reasons.move_to_end(request_id)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def reason(self, request_id: RequestId) -> StopReason | None:
        """Why its runs are not wanted any more; None for ids that are not known."""
        if request_id in self._reasons:
            self._reasons.move_to_end(request_id)
        return self._reasons.get(request_id)
