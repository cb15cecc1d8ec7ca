"""Which KV blocks have a copy in host memory, and where."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BlockHash = bytes
"""Of a block and all blocks before it in its sequence."""


@dataclass(slots=True)
class _Copy:
    slot: int
    before: "_Copy | None"
    """Of the block before it."""
    num_next: int = 0
    """Copies of blocks that come after it, in any sequence."""


class HostIndex:
    """
    Host memory in slots of one block each; decides alone what every slot holds.

    A sequence's copies are always a prefix of it: a block has a copy only while the blocks
    before it have one, since no other could be restored. The least recently used sequence loses
    its last block first.

    Args:
        num_slots: What the memory has room for.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Least recently used first. A block comes after the blocks that follow it in any
        # sequence, so that the first one has none that depend on it.
        self._copies: dict[BlockHash, _Copy] = {}
        self._free: list[int] = []
        self._num_touched = 0
        """Slots that were in use since the last `clear` are those below."""

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_used(self) -> int:
        return len(self._copies)

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks at the beginning of *hashes* that have a copy."""
        return bisect_left(hashes, True, key=lambda content: content not in self._copies)

    def slots(self, hashes: Iterable[BlockHash]) -> list[int]:
        """
        Where the copies of *hashes* are.

        Raises:
            KeyError: One of them has none.
        """
        return [self._copies[content].slot for content in hashes]

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """The sequence *hashes*, whole from its first block and with copies, is in use."""
        for content in reversed(hashes):
            self._copies[content] = self._copies.pop(content)

    def store(self, hashes: Sequence[BlockHash]) -> list[int]:
        """
        Give the blocks of a sequence slots, those of others if need be.

        Args:
            hashes: Of a sequence, from its first block.

        Returns:
            Slots of the blocks after the first `num_known`, which must be filled now; fewer
            than there are blocks if the memory is too small for the sequence.
        """
        known = self.num_known(hashes)
        # Most recent from here on, so that no block makes room for one of its own sequence.
        self.touch(hashes[:known])
        stored = min(len(hashes), self._num_slots)
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
        The sequence *hashes* is not needed any more; what other copies begin with stays.

        Args:
            hashes: From its first block.
            keep: So many of its first blocks stay in any case.
        """
        for content in reversed(hashes[keep : self.num_known(hashes)]):
            if self._copies[content].num_next:
                break
            self._free.append(self._remove(content))

    def clear(self) -> None:
        """Forget all copies."""
        self._copies.clear()
        self._free.clear()
        self._num_touched = 0

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_touched < self._num_slots:
            self._num_touched += 1
            return self._num_touched - 1
        return self._remove(next(iter(self._copies)))

    def _remove(self, content: BlockHash) -> int:
        """Forget a copy that none comes after; gives its slot."""
        copy = self._copies.pop(content)
        if copy.before is not None:
            copy.before.num_next -= 1
        return copy.slot
