"""KV checkpoints in simulated host memory, and the time that copying takes."""

from collections.abc import Sequence
from dataclasses import replace

from services.agent.backends.host_claims import HostClaims
from services.agent.backends.host_index import BlockHash, HostIndex
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.run import Run
from services.agent.backends.totals import CheckpointTotals
from shared.contracts.base import Seconds

_ALL = 1 << 60


class HostMemory:
    """
    Copies what vLLM's engine core copies with our KV connector, and when it does.

    Args:
        settings: Room and time.
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
        """How many blocks of *hashes* from the *first* on have copies, without a gap."""
        return max(0, self._index.num_known(hashes) - first)

    def restore(self, hashes: Sequence[BlockHash], first: int) -> None:
        """Copy *hashes* from the *first* on back; all of them have copies."""
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
        """Copy those of the first *num_full* blocks of *run* that host memory has not."""
        if not run.checkpointed or num_full <= run.num_saved:
            return
        hashes = run.hashes[:num_full]
        known = self._index.num_known(hashes)
        count = len(self._index.store(hashes)) if known >= run.num_saved else 0
        # Copies that went with another run are made again; without room it is saved no further.
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
        """*run* is new to the engine."""
        if run.checkpointed:
            self._claims.begin(run.origin, lambda: run.hashes)

    def leave(self, run: Run) -> None:
        """*run* was aborted, and may come back as another one."""
        self._claims.leave(run.origin)

    def release(self, run: Run) -> None:
        """*run* has given its whole answer."""
        self._claims.finish(run.origin)

    def take_due_s(self) -> Seconds:
        """Time for all copies since the last call; the next iteration takes so much longer."""
        due_s, self._due_s = self._due_s, 0.0
        return due_s

    def clear(self) -> None:
        """Forget all copies."""
        self._index.clear()
        self._claims.clear()
