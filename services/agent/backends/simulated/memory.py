"""KV of the simulated engine: blocks on the device, and copies of them in host memory."""

from collections.abc import Iterable, Sequence

from services.agent.backends.host_index import BlockHash
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.blocks import BlockPool, block_hashes
from services.agent.backends.simulated.host import HostMemory
from services.agent.backends.simulated.run import Run


class KvMemory:
    """
    KV of current runs, and cached KV of earlier runs.

    Args:
        settings: Sizes of blocks and memory, and the time of copies.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self._block_tokens = settings.block_tokens
        self.pool = BlockPool(settings.kv_capacity_tokens // settings.block_tokens)
        self.host = HostMemory(settings)

    def begin(self, run: Run) -> bool:
        """
        Allocate blocks for all known tokens of *run*; return False if free memory is too small.

        Sets `num_computed_tokens` to the tokens whose KV exists: in cached blocks, then in blocks
        restored from host memory.
        """
        size = self._block_tokens
        run.hashes = _hashes(run, size)
        # The last token is always computed, because its computation generates the first output
        # token.
        usable = run.hashes[: (len(run.tokens) - 1) // size]
        hits = self.pool.cached_prefix(usable)
        needed = -(-len(run.tokens) // size) - len(hits)
        if needed > self.pool.num_free - self.pool.num_unused(hits):
            return False
        self.pool.take(hits)
        run.blocks = hits
        run.num_computed_tokens = (len(hits) + self._restore(run, usable)) * size
        if run.cached_tokens is None:
            run.cached_tokens = run.num_computed_tokens
        return True

    def grow(self, run: Run, count: int) -> bool:
        """
        Allocate KV for *count* more tokens; if memory is too small, return False without a change.
        """
        end = run.num_computed_tokens + count
        blocks = self.pool.allocate(max(0, -(-end // self._block_tokens) - len(run.blocks)))
        if blocks is None:
            return False
        run.blocks.extend(blocks)
        return True

    def compute(self, run: Run, count: int) -> None:
        """
        Record that *count* more tokens of *run* are computed; `grow` has allocated their KV blocks.
        """
        size = self._block_tokens
        first_full = run.num_computed_tokens // size
        run.num_computed_tokens += count
        num_full = run.num_computed_tokens // size
        if num_full > len(run.hashes):
            run.hashes = _hashes(run, size)
        for index in range(first_full, num_full):
            self.pool.remember(run.blocks[index], run.hashes[index])

    def save(self, run: Run) -> None:
        """Copy the full KV blocks of *run* to host memory if the run is checkpointed."""
        self.host.save(run, run.num_computed_tokens // self._block_tokens)

    def clear(self, running: Iterable[Run]) -> None:
        """
        Drop KV that no run of *running* owns, and copy the KV of these runs to host memory again.
        """
        self.pool.forget_unused()
        self.host.clear()
        for run in running:
            run.num_saved = 0

    def _restore(self, run: Run, usable: Sequence[BlockHash]) -> int:
        """
        Restore KV blocks after the last block of *run*; the caller ensures that they fit into
        memory.
        """
        first = len(run.blocks)
        count = self.host.restorable(usable, first)
        blocks = self.pool.allocate(count) or []
        for block, content in zip(blocks, usable[first:], strict=False):
            self.pool.remember(block, content)
        run.blocks += blocks
        if count:
            self.host.restore(usable[: first + count], first)
        return count


def _hashes(run: Run, block_tokens: int) -> list[BlockHash]:
    """Hashes of the full blocks of *run*; adapters share no KV."""
    root = (run.request.adapter or "").encode()
    return block_hashes(tuple(run.tokens), block_tokens, run.hashes, root)
