"""All waiting requests of one engine, by rank and importance."""

import heapq
from collections.abc import Callable, Iterable

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import Importance
from solver.scheduling.engine.entry import Entry, Rank
from solver.scheduling.engine.load_level import LoadLevel
from solver.scheduling.engine.options import SchedulingOptions
from solver.scheduling.engine.priority import KEYS, remaining_work_tokens

EntryKey = Callable[[Entry], float]
_Item = tuple[float, int, int, Entry]
_SLACK = 64
"""Number of stale items that a heap may hold before it is rebuilt."""


class WaitingHeap:
    """
    A priority queue with one key per request and load level; only one load level applies at a time.

    Changing the load level costs nothing, so that the work weight can follow the load with 100,000
    waiting requests. Removal is lazy: a heap is rebuilt when most of its items are stale.

    Args:
        keys: Key function of each load level; evaluated when a request is pushed.
    """

    def __init__(self, keys: tuple[EntryKey, ...]) -> None:
        self._keys = keys
        self._heaps: list[list[_Item]] = [[] for _ in keys]
        self._entries: dict[int, Entry] = {}
        self.tokens = 0
        """Prefill tokens of all requests in the heap."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry.place in self._entries

    def push(self, entry: Entry) -> None:
        """Add *entry*, which must not be in a heap."""
        self._entries[entry.place] = entry
        self.tokens += entry.prefill_tokens
        for key, heap in zip(self._keys, self._heaps, strict=True):
            heapq.heappush(heap, (key(entry), entry.place, entry.version, entry))
            if len(heap) > 2 * len(self._entries) + _SLACK:
                self._drop_stale(heap)

    def discard(self, entry: Entry) -> None:
        """Discard *entry* from the heap."""
        del self._entries[entry.place]
        entry.version += 1
        self.tokens -= entry.prefill_tokens

    def peek(self, level: int) -> tuple[float, Entry] | None:
        """Key and entry with the smallest key of load level *level*."""
        heap = self._heaps[level]
        while heap:
            key, _, version, entry = heap[0]
            if version == entry.version:
                return key, entry
            heapq.heappop(heap)
        return None

    def _drop_stale(self, heap: list[_Item]) -> None:
        heap[:] = [item for item in heap if item[2] == item[3].version]
        heapq.heapify(heap)


class WaitingWork:
    """
    Waiting requests by rank and importance, with the load level that determines their keys.

    Decided: in the overload mode, work of low importance is ordered as if it were due later, by
    `unimportant_delay_s`. So an important request waits only for unimportant requests whose
    deadlines are earlier by more than this delay, and important requests with much time left do not
    delay urgent unimportant requests. Two alternatives are worse. If only late requests were
    relegated, unimportant requests would make important requests late. If all unimportant requests
    were relegated, many of them would be late without need.
    """

    def __init__(self, options: SchedulingOptions) -> None:
        self._options = options
        by_level = tuple(_key(options, weight) for weight in options.work_weights)
        self._important = WaitingHeap(by_level)
        self._unimportant = WaitingHeap(by_level)
        self._relegated = WaitingHeap(by_level)
        self._best_effort = WaitingHeap(tuple(_arrival for _ in by_level))
        self._load = LoadLevel(on_s=options.high_load_s, off_s=options.low_load_s)
        self._overload = LoadLevel(on_s=options.overload_s, off_s=options.recovered_s)
        self._keys = by_level

    def __len__(self) -> int:
        return sum(map(len, self._heaps()))

    @property
    def level(self) -> int:
        """Index of the work weight at the current load level."""
        return int(self._load.is_on) if len(self._keys) > 1 else 0

    @property
    def overloaded(self) -> bool:
        return self._overload.is_on

    def key(self, entry: Entry) -> float:
        """The sort key of *entry* at the current load level."""
        if entry.rank is Rank.BEST_EFFORT:
            return _arrival(entry)
        key = self._keys[self.level](entry)
        if entry.view.importance is Importance.LOW and entry.rank is Rank.REGULAR:
            key += self._delay_s
        return key

    def observe(self, token_s: Seconds) -> None:
        """
        Update the load level and the overload mode; a prefill token currently takes *token_s*
        seconds.
        """
        important_s = self._important.tokens * token_s
        all_s = important_s + self._unimportant.tokens * token_s
        self._load.observe(all_s)
        if self._options.overload_mode:
            self._overload.observe(all_s)

    def push(self, entry: Entry) -> None:
        """Add *entry* to the waiting requests."""
        entry.waiting = True
        self._heap(entry).push(entry)

    def discard(self, entry: Entry) -> None:
        """Remove *entry* from the waiting requests."""
        entry.waiting = False
        for heap in self._heaps():
            if entry in heap:
                heap.discard(entry)
                return

    def first(self) -> tuple[int, float, Entry] | None:
        """Rank, key and entry of the request to be served next; None if no request waits."""
        level = self.level
        high = self._important.peek(level)
        low = self._unimportant.peek(level)
        if low is not None and (high is None or low[0] + self._delay_s < high[0]):
            return Rank.REGULAR, low[0] + self._delay_s, low[1]
        if high is not None:
            return Rank.REGULAR, *high
        for rank, heap in (
            (Rank.RELEGATED, self._relegated),
            (Rank.BEST_EFFORT, self._best_effort),
        ):
            if (item := heap.peek(level)) is not None:
                return rank, *item
        return None

    def aged(self, now: UnixTime) -> Entry | None:
        """
        The first relegated or best-effort request that is older than the aging bound, of two the
        one that arrived first.
        """
        heads = (heap.peek(self.level) for heap in (self._relegated, self._best_effort))
        aged_at = now - self._options.aging_bound_s
        aged = [head[1] for head in heads if head is not None and _arrival(head[1]) <= aged_at]
        return min(aged, key=_arrival, default=None)

    def relegate(self, entry: Entry) -> None:
        """Relegate a waiting request that will miss its deadline."""
        self.discard(entry)
        entry.rank = Rank.RELEGATED
        self.push(entry)

    @property
    def _delay_s(self) -> Seconds:
        """Delay that is added to the deadlines of unimportant work; 0 outside the overload mode."""
        return self._options.unimportant_delay_s if self._overload.is_on else 0.0

    def _heap(self, entry: Entry) -> WaitingHeap:
        if entry.rank is Rank.REGULAR:
            low = entry.view.importance is Importance.LOW
            return self._unimportant if low else self._important
        return self._relegated if entry.rank is Rank.RELEGATED else self._best_effort

    def _heaps(self) -> Iterable[WaitingHeap]:
        return (
            self._important,
            self._unimportant,
            self._relegated,
            self._best_effort,
        )


def _arrival(entry: Entry) -> float:
    return entry.view.arrived_at


def _key(options: SchedulingOptions, weight: Seconds) -> EntryKey:
    function = KEYS[options.ordering]

    def key(entry: Entry) -> float:
        work = remaining_work_tokens(
            entry.qos_class,
            prefill_tokens=entry.prefill_tokens,
            decode_tokens=entry.decode_tokens,
        )
        arrived_at = entry.view.arrived_at
        return function(arrived_at, entry.key_deadline_at, work, weight, entry.service_s)

    return key
