"""Whose copies in host memory are still needed, so that no other's end takes them away."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.agent.backends.host_index import BlockHash, HostIndex

MAX_LEFT = 1024
"""Aborted requests that are remembered."""


class HostClaims:
    """
    Sequences that are to go on: of running requests, and of aborted ones, which may come back.

    They keep nothing when memory is short; that is the index's matter.

    Args:
        index: Of the copies.
    """

    def __init__(self, index: HostIndex) -> None:
        self._index = index
        self._running: dict[str, Callable[[], Sequence[BlockHash]]] = {}
        self._left: OrderedDict[str, Sequence[BlockHash]] = OrderedDict()

    def begin(self, origin: str, hashes: Callable[[], Sequence[BlockHash]]) -> None:
        """A run of the request *origin* begins, the first or a later one."""
        self._left.pop(origin, None)
        self._running[origin] = hashes

    def leave(self, origin: str) -> None:
        """The run was aborted."""
        hashes = self._running.pop(origin, None)
        if hashes is not None:
            self._left[origin] = tuple(hashes())
            while len(self._left) > MAX_LEFT:
                self._left.popitem(last=False)

    def finish(self, origin: str) -> None:
        """The request has its whole answer; what no other needs of its copies goes."""
        own = self._running.pop(origin, None)
        if own is None:
            return
        hashes = own()
        others = [*(running() for running in self._running.values()), *self._left.values()]
        kept = max((_num_common(hashes, other) for other in others), default=0)
        self._index.release(hashes, keep=kept)

    def clear(self) -> None:
        """All copies are forgotten."""
        self._left.clear()


def _num_common(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Blocks at the beginning of both; each block's name says what is before it."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda index: one[index] != other[index])
