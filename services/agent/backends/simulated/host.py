"""KV checkpoints of the simulated engine in host memory, and the time of their copies."""

from collections.abc import Sequence
from dataclasses import replace

from services.agent.backends.host_claims import HostClaims
from services.agent.backends.host_index import BlockHash, HostIndex
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.run import Run
from services.agent.backends.totals import CheckpointTotals
from shared.contracts.base import RequestId, Seconds

_ALL = 1 << 60


class HostMemory:
    """
    Copies KV to host memory; selects the same blocks at the same times as Headway's KV connector
    for vLLM.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self._index = HostIndex(settings.host_kv_tokens // settings.block_tokens)
        self._claims = HostClaims(self._index)
        self._block_bytes = settings.block_tokens * settings.kv_bytes_per_token
        self._block_copy_s = settings.block_tokens * settings.host_copy_s_per_token
        self._due_s = 0.0
        self.totals = CheckpointTotals()

    @property
    def used_bytes(self) -> int:
        return self._index.num_used * self._block_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._index.num_slots * self._block_bytes

    def restorable(self, hashes: Sequence[BlockHash], first: int) -> int:
        """
        Number of consecutive KV blocks of *hashes*, from index *first* on, that have host copies.
        """
        return max(0, self._index.num_known(hashes) - first)

    def restore(self, hashes: Sequence[BlockHash], first: int) -> None:
        """
        Restore the KV blocks of *hashes* from index *first* on; all of these blocks must have host
        copies.
        """
        self._index.touch(hashes)
        count = len(hashes) - first
        self._due_s += count * self._block_copy_s
        self.totals = replace(
            self.totals,
            restored_blocks=self.totals.restored_blocks + count,
            restored_bytes=self.totals.restored_bytes + count * self._block_bytes,
            restore_s=self.totals.restore_s + count * self._block_copy_s,
        )

    def save(self, run: Run, num_full: int) -> None:
        """
        Copy the first *num_full* KV blocks of *run* to host memory, except blocks that have a host
        copy.
        """
        if not run.request.checkpointed or num_full <= run.num_saved:
            return
        hashes = run.hashes[:num_full]
        known = self._index.num_known(hashes)
        count = len(self._index.store(hashes)) if known >= run.num_saved else 0
        # Blocks whose copies the index dropped with another run are copied again. Once host memory
        # is full, no further blocks of this run are saved.
        run.num_saved = num_full
        if known + count < num_full:
            run.num_saved = known if self._index.num_used < self._index.num_slots else _ALL
        self._due_s += count * self._block_copy_s
        self.totals = replace(
            self.totals,
            saved_blocks=self.totals.saved_blocks + count,
            saved_bytes=self.totals.saved_bytes + count * self._block_bytes,
            save_s=self.totals.save_s + count * self._block_copy_s,
        )

    def track(self, run: Run) -> None:
        """Register *run*, which is new to the engine."""
        if run.request.checkpointed:
            self._claims.begin(_origin(run), lambda: run.hashes)

    def leave(self, run: Run) -> None:
        """Record that *run* was aborted; a later run may resume its request."""
        self._claims.leave(_origin(run))

    def release(self, run: Run) -> None:
        """Release the host copies of the KV of *run*, whose answer is complete."""
        self._claims.finish(_origin(run))

    def take_due_s(self) -> Seconds:
        """
        Return the duration of KV copies since the last call, which is added to the next iteration.
        """
        due_s, self._due_s = self._due_s, 0.0
        return due_s

    def clear(self) -> None:
        """Drop all KV copies in host memory."""
        self._index.clear()
        self._claims.clear()


def _origin(run: Run) -> RequestId:
    """Id of the request that *run* belongs to."""
    return run.request.origin or run.request_id
