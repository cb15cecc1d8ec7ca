"""KV memory in blocks with prefix caching, modelled on vLLM's block pool."""

from collections.abc import Sequence
from hashlib import blake2b

from services.agent.backends.host_index import BlockHash
from shared.contracts.requests import Tokens


def block_hashes(
    token_ids: Tokens, block_tokens: int, parents: Sequence[BlockHash] = (), root: bytes = b""
) -> list[BlockHash]:
    """
    Return one hash per full KV block; each hash covers all tokens up to the end of its block.

    Args:
        token_ids: The whole sequence.
        block_tokens: Tokens in a block.
        parents: Hashes of the first blocks, if known.
        root: Part of the first hash: equal tokens with different roots share no KV.
    """
    hashes = list(parents)
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        digest = blake2b(hashes[-1] if hashes else root, digest_size=16)
        digest.update(repr(token_ids[start : start + block_tokens]).encode())
        hashes.append(digest.digest())
    return hashes


class BlockPool:
    """
    Used and free KV blocks and their content.

    Freed blocks keep their content until they are allocated again. The least recently freed block
    is allocated first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._users: list[int] = [0] * num_blocks
        self._content: list[BlockHash | None] = [None] * num_blocks
        self._by_content: dict[BlockHash, int] = {}
        # A dict is the LRU list: the first key was freed longest ago.
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def utilization(self) -> float:
        """Share of KV blocks in use, 0..1."""
        return 1.0 - len(self._free) / self._num_blocks

    def cached_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """
        The blocks of the longest cached prefix of *hashes*. This method does not add a user to the
        blocks.
        """
        blocks = []
        for content in hashes:
            block = self._by_content.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Sequence[int]) -> int:
        """
        Number of free blocks among *blocks*. Taking *blocks* reduces the free blocks by this
        number.
        """
        return sum(self._users[block] == 0 for block in blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Add one user to each of the KV blocks *blocks*."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Allocate *count* empty KV blocks; allocate none if fewer than *count* are free."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block = next(iter(self._free))
            del self._free[block]
            self._forget(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def remember(self, block: int, content: BlockHash) -> None:
        """
        Register *content* as the content of the full *block*; of equal blocks only the first is
        registered.
        """
        if content not in self._by_content:
            self._forget(block)
            self._by_content[content] = block
            self._content[block] = content

    def forget_unused(self) -> None:
        """Discard the cached content of all free KV blocks."""
        for block in self._free:
            self._forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """
        Remove one user from each of a sequence's *blocks*; the last block is allocated again first.
        """
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._by_content[content]
            self._content[block] = None
