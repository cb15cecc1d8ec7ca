"""Waiting requests in heaps whose keys change only when a request moves."""

import heapq
from collections.abc import Callable

from solver.scheduling.entry import Entry

EntryKey = Callable[[Entry], float]
_Item = tuple[float, int, int, Entry]

_SLACK = 64


class WaitingHeap:
    """
    A priority queue with several keys per request, of which one holds at a time.

    Changing which of them holds costs nothing, so that the work weight can follow the load with
    100,000 requests waiting. Removal is lazy: the heaps are rebuilt when they are mostly stale.

    Args:
        keys: One per load level; evaluated when a request is pushed.
    """

    def __init__(self, keys: tuple[EntryKey, ...]) -> None:
        self._keys = keys
        self._heaps: list[list[_Item]] = [[] for _ in keys]
        self._entries: dict[int, Entry] = {}
        self.tokens = 0
        """Prefill tokens of all of them."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry.place in self._entries

    def push(self, entry: Entry) -> None:
        """Add *entry*, which is in no heap."""
        self._entries[entry.place] = entry
        self.tokens += entry.prefill_tokens
        for key, heap in zip(self._keys, self._heaps, strict=True):
            heapq.heappush(heap, (key(entry), entry.place, entry.version, entry))
            if len(heap) > 2 * len(self._entries) + _SLACK:
                self._drop_stale(heap)

    def discard(self, entry: Entry) -> None:
        """Take *entry* out, wherever it stands."""
        del self._entries[entry.place]
        entry.version += 1
        self.tokens -= entry.prefill_tokens

    def peek(self, level: int) -> tuple[float, Entry] | None:
        """Key and request of the first, by the keys of *level*."""
        heap = self._heaps[level]
        while heap:
            key, _, version, entry = heap[0]
            if version == entry.version:
                return key, entry
            heapq.heappop(heap)
        return None

    def entries(self) -> tuple[Entry, ...]:
        """All of them, in order of arrival here."""
        return tuple(self._entries.values())

    def _drop_stale(self, heap: list[_Item]) -> None:
        heap[:] = [item for item in heap if item[2] == item[3].version]
        heapq.heapify(heap)
