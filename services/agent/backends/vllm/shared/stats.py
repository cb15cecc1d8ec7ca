"""
Telemetry and limits in memory that the engine core shares with the agent's front.

Neither process waits: the core writes, and the front reads the current content. The header may mix
values of two successive iterations; a record never does.
"""

from pathlib import Path

import numpy as np

from services.agent.backends.base import EngineLoad
from services.agent.backends.totals import CheckpointTotals, SchedulingTotals
from services.agent.backends.vllm.shared.shared_file import SharedFile, named
from shared.contracts.telemetry import EngineIteration

_NUM_RECORDS = 8192
_LAYOUT = np.dtype(
    [
        ("num_written", "u8"),
        (
            "load",
            [
                ("running", "u8"),
                ("waiting", "u8"),
                ("kv_utilization", "f8"),
                ("kv_capacity_tokens", "u8"),
                ("token_budget", "u8"),
                ("max_running", "u8"),
                ("host_kv_bytes", "u8"),
                ("host_kv_capacity_bytes", "u8"),
            ],
        ),
        ("scheduling", [("held", "u8"), ("preempted", "u8"), ("relegated", "u8")]),
        (
            "checkpoints",
            [
                ("saved_blocks", "u8"),
                ("restored_blocks", "u8"),
                ("saved_bytes", "u8"),
                ("restored_bytes", "u8"),
                ("save_s", "f8"),
                ("restore_s", "f8"),
            ],
        ),
        ("limits", [("token_budget", "u8"), ("max_running", "u8")]),
        (
            "iterations",
            [
                ("compute_tokens", "u8"),
                ("context_tokens", "u8"),
                ("num_decodes", "u8"),
                ("duration_s", "f8"),
                ("prefill_pairs", "f8"),
            ],
            (_NUM_RECORDS,),
        ),
    ]
)


def rank_path(path: Path, rank: int) -> Path:
    """File of the data-parallel rank *rank*, if *path* is that of the first rank."""
    return path if rank == 0 else path.with_name(f"{path.name}.{rank}")


class StatsWriter(SharedFile):
    """Access of the engine core to the shared memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _LAYOUT)
        self._num_written = 0

    def write(self, iteration: EngineIteration) -> None:
        """Append *iteration*; overwrites the oldest one if the buffer is full."""
        self.record["iterations"][self._num_written % _NUM_RECORDS] = (
            iteration.compute_tokens,
            iteration.context_tokens,
            iteration.num_decodes,
            iteration.duration_s,
            iteration.prefill_pairs,
        )
        self._num_written += 1

    def publish(self, load: EngineLoad) -> None:
        """Publish *load* and the iterations written so far."""
        self.record["num_written"] = self._num_written
        self.record["load"] = (
            load.running,
            load.waiting,
            load.kv_utilization,
            load.kv_capacity_tokens,
            load.token_budget,
            load.max_running,
            load.host_kv_bytes,
            load.host_kv_capacity_bytes,
        )
        totals = load.scheduling
        self.record["scheduling"] = (totals.held, totals.preempted, totals.relegated)
        copies = load.checkpoints
        self.record["checkpoints"] = (
            copies.saved_blocks,
            copies.restored_blocks,
            copies.saved_bytes,
            copies.restored_bytes,
            copies.save_s,
            copies.restore_s,
        )

    def limits(self) -> tuple[int, int]:
        """Limits of tokens and requests per iteration, set by the front; 0 means unlimited."""
        limits: tuple[int, int] = self.record["limits"].item()
        return limits


class StatsReader(SharedFile):
    """Access of the front to the shared memory; creates the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.itemsize))
        super().__init__(path, _LAYOUT)
        self._num_read = 0

    def load(self) -> EngineLoad:
        """The engine's load after its last iteration."""
        return EngineLoad(
            **named(self.record["load"]),
            scheduling=SchedulingTotals(**named(self.record["scheduling"])),
            checkpoints=CheckpointTotals(**named(self.record["checkpoints"])),
        )

    def drain(self) -> tuple[EngineIteration, ...]:
        """Iterations since the last call, without overwritten ones."""
        end = int(self.record["num_written"])
        first = max(self._num_read, end - _NUM_RECORDS)
        self._num_read = end
        numbers = np.arange(first, end) % _NUM_RECORDS
        iterations = [
            EngineIteration(
                compute_tokens=compute,
                context_tokens=context,
                num_decodes=decodes,
                duration_s=duration_s,
                prefill_pairs=pairs,
            )
            for compute, context, decodes, duration_s, pairs in (
                self.record["iterations"][numbers].tolist()
            )
        ]
        # Drop records that the core overwrote during this read; one more record may be half
        # written.
        overwritten = int(self.record["num_written"]) + 1 - _NUM_RECORDS - first
        return tuple(iterations[max(0, overwritten) :])

    def limit(self, *, token_budget: int, max_running: int) -> None:
        """Set the engine's limits from its next iteration on."""
        self.record["limits"] = (token_budget, max_running)
