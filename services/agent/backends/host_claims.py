"""Claims of requests on host copies of KV; a finished request releases only unclaimed copies."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from cachetools import FIFOCache

from services.agent.backends.host_index import BlockHash, HostIndex

MAX_ABORTED = 1024
"""Maximum number of aborted requests that are remembered."""


class HostClaims:
    """
    Block sequences of running requests, and of aborted requests that may resume.

    Claims do not prevent evictions: when memory is short, the index evicts claimed copies also.
    """

    def __init__(self, index: HostIndex) -> None:
        self._index = index
        self._running: dict[str, Callable[[], Sequence[BlockHash]]] = {}
        self._left: FIFOCache[str, Sequence[BlockHash]] = FIFOCache(MAX_ABORTED)

    def begin(self, origin: str, hashes: Callable[[], Sequence[BlockHash]]) -> None:
        """Register a run of the request *origin*; earlier runs of that request may have claims."""
        self._left.pop(origin, None)
        self._running[origin] = hashes

    def leave(self, origin: str) -> None:
        """Record that a run was aborted; the claim of its request on host copies of KV remains."""
        hashes = self._running.pop(origin, None)
        if hashes is not None:
            self._left[origin] = tuple(hashes())

    def finish(self, origin: str) -> None:
        """Record that a request is complete; release the KV copies that no other request claims."""
        own = self._running.pop(origin, None)
        if own is None:
            return
        hashes = own()
        others = [*(running() for running in self._running.values()), *self._left.values()]
        kept = max((_num_common(hashes, other) for other in others), default=0)
        self._index.release(hashes, keep=kept)

    def clear(self) -> None:
        """Drop the claims of aborted requests, after all copies in host memory were dropped."""
        self._left.clear()


def _num_common(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """
    Length of the common prefix of two sequences of KV blocks, in blocks.

    The hash of a block covers the block and all blocks before it.
    """
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda index: one[index] != other[index])
