"""Index of the KV blocks that have a copy in host memory."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BlockHash = bytes
"""Hash of a KV block together with all blocks before the block in its sequence."""


@dataclass(slots=True)
class _Copy:
    slot: int
    before: "_Copy | None"
    """Host copy of the KV block that precedes this block in its sequence."""
    num_next: int = 0
    """Number of host copies of KV blocks that directly follow this block, in any sequence."""


class HostIndex:
    """
    Allocates host memory in slots of one block each. Only this class assigns slots.

    A block can be restored only together with all blocks before it, so the copies of a sequence
    always form a prefix. The last block of the least recently used sequence is evicted first.

    Args:
        num_slots: Capacity in slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Least recently used first. A block comes after the blocks that follow it in any sequence,
        # so that no other copy depends on the first entry.
        self._copies: dict[BlockHash, _Copy] = {}
        self._free: list[int] = []
        self._num_touched = 0
        """
        Number of memory slots used at least once since the last `clear`: the slots with the lowest
        numbers.
        """

    @property
    def num_used(self) -> int:
        return len(self._copies)

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading KV blocks of *hashes* that have a copy in host memory."""
        return bisect_left(hashes, True, key=lambda content: content not in self._copies)

    def slots(self, hashes: Iterable[BlockHash]) -> list[int]:
        """
        Return the memory slots with the copies of the blocks *hashes*.

        Raises:
            KeyError: A block has no copy.
        """
        return [self._copies[content].slot for content in hashes]

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """
        Mark the blocks *hashes* of one sequence as recently used; every block must have a host
        copy.
        """
        for content in reversed(hashes):
            self._copies[content] = self._copies.pop(content)

    def store(self, hashes: Sequence[BlockHash]) -> list[int]:
        """
        Allocate slots for the blocks of a sequence; evict copies of other sequences if necessary.

        Args:
            hashes: The blocks of the sequence, from the first one on.

        Returns:
            Slots of the blocks after the first `num_known`. The caller must fill them now. If the
            memory is too small for the sequence, its last blocks get no slots.
        """
        known = self.num_known(hashes)
        # Mark the known blocks as most recently used, so that no new block evicts one of the same
        # sequence.
        self.touch(hashes[:known])
        stored = min(len(hashes), self.num_slots)
        slots = [self._take_slot() for _ in hashes[known:stored]]
        before = self._copies[hashes[known - 1]] if known else None
        for content, slot in zip(hashes[known:stored], slots, strict=True):
            if before is not None:
                before.num_next += 1
            before = self._copies[content] = _Copy(slot, before)
        self.touch(hashes[:stored])
        return slots

    def release(self, hashes: Sequence[BlockHash], *, keep: int = 0) -> None:
        """
        Drop the host copies of the blocks *hashes* on which no other copy depends.

        Args:
            hashes: The blocks of a sequence, from the first one on.
            keep: Number of leading blocks that keep their copies.
        """
        for content in reversed(hashes[keep : self.num_known(hashes)]):
            if self._copies[content].num_next:
                break
            self._free.append(self._remove(content))

    def clear(self) -> None:
        """Drop the host copies of all KV blocks."""
        self._copies.clear()
        self._free.clear()
        self._num_touched = 0

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_touched < self.num_slots:
            self._num_touched += 1
            return self._num_touched - 1
        return self._remove(next(iter(self._copies)))

    def _remove(self, content: BlockHash) -> int:
        """
        Drop the host copy of a block on which no other copy depends; return the copy's memory slot.
        """
        copy = self._copies.pop(content)
        if copy.before is not None:
            copy.before.num_next -= 1
        return copy.slot
