"""Claims of requests on host copies of KV; a finished request releases only unclaimed copies."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.agent.backends.host_index import BlockHash, HostIndex

MAX_ABORTED = 1024
"""Maximum number of aborted requests that are remembered."""


@dataclass(slots=True)
class _Claim:
    hashes: Callable[[], Sequence[BlockHash]]
    """Returns the blocks of the request's sequence, which only grows."""
    counted: list[BlockHash] = field(default_factory=list)
    """The first blocks of the sequence, which are in the counts."""


class HostClaims:
    """
    Block sequences of running requests, and of aborted requests that may resume.

    Claims do not prevent evictions: when memory is short, the index evicts claimed copies also.
    """

    def __init__(self, index: HostIndex) -> None:
        self._index = index
        self._running: dict[str, _Claim] = {}
        self._left: OrderedDict[str, list[BlockHash]] = OrderedDict()
        """Sequences of aborted requests, oldest first."""
        self._counts: Counter[BlockHash] = Counter()
        """
        Block -> number of sequences with it. A running sequence is counted when a request finishes.
        """

    def begin(self, origin: str, hashes: Callable[[], Sequence[BlockHash]]) -> None:
        """Register a run of the request *origin*; earlier runs of that request may have claims."""
        self._uncount(self._left.pop(origin, ()))
        if (earlier := self._running.pop(origin, None)) is not None:
            self._uncount(earlier.counted)
        self._running[origin] = _Claim(hashes)

    def leave(self, origin: str) -> None:
        """Record that a run was aborted; the claim of its request on host copies of KV remains."""
        claim = self._running.pop(origin, None)
        if claim is None:
            return
        self._count(claim)
        self._left[origin] = claim.counted
        if len(self._left) > MAX_ABORTED:
            self._uncount(self._left.popitem(last=False)[1])

    def finish(self, origin: str) -> None:
        """Record that a request is complete; release the KV copies that no other request claims."""
        claim = self._running.pop(origin, None)
        if claim is None:
            return
        self._uncount(claim.counted)
        for other in self._running.values():
            self._count(other)
        hashes = claim.hashes()
        # The hash of a block covers the block and all blocks before it, so that a sequence with a
        # block has all blocks before it also.
        kept = bisect_left(hashes, True, key=lambda content: content not in self._counts)
        self._index.release(hashes, keep=kept)

    def clear(self) -> None:
        """Drop the claims of aborted requests, after all copies in host memory were dropped."""
        for hashes in self._left.values():
            self._uncount(hashes)
        self._left.clear()

    def _count(self, claim: _Claim) -> None:
        """Count the blocks by which the sequence of a claim has grown."""
        new = claim.hashes()[len(claim.counted) :]
        claim.counted += new
        self._counts.update(new)

    def _uncount(self, hashes: Sequence[BlockHash]) -> None:
        for content in hashes:
            self._counts[content] -= 1
            if not self._counts[content]:
                del self._counts[content]
