"""
Telemetry and limits in memory that the engine core and the agent's front share.

Nobody ever waits: the core writes, the front reads what is there. A reader may see a mixture of
two neighbouring iterations in the header, never in a record.
"""

import struct
from dataclasses import astuple, dataclass, field
from pathlib import Path

from services.agent.backends.totals import CheckpointTotals, SchedulingTotals
from services.agent.backends.vllm.shared_file import SharedFile
from shared.contracts.telemetry import EngineIteration

_NUM_RECORDS = 8192
_NUMBER = struct.Struct("<Q")
_HEADER = struct.Struct("<QQQdQQQQQQQQQddQQ")
_LIMITS = struct.Struct("<QQ")
_RECORD = struct.Struct("<QQQdd")
_LIMITS_AT = 192
_RECORDS_AT = 256
_SIZE = _RECORDS_AT + _NUM_RECORDS * _RECORD.size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engine core last said of itself."""

    running: int
    waiting: int
    kv_utilization: float
    kv_capacity_tokens: int
    token_budget: int = 0
    """Of the last iteration."""
    scheduling: SchedulingTotals = field(default_factory=SchedulingTotals)
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
    host_kv_bytes: int = 0
    host_kv_capacity_bytes: int = 0


class StatsWriter(SharedFile):
    """The engine core's side."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SIZE)
        self._num_written = 0

    def write(self, iteration: EngineIteration) -> None:
        """Append *iteration*, over the oldest if there is no room."""
        at = _RECORDS_AT + self._num_written % _NUM_RECORDS * _RECORD.size
        self.put(
            _RECORD,
            at,
            iteration.compute_tokens,
            iteration.context_tokens,
            iteration.num_decodes,
            iteration.duration_s,
            iteration.prefill_pairs,
        )
        self._num_written += 1

    def publish(self, load: EngineLoad) -> None:
        """Show *load*, and the iterations written so far."""
        self.put(
            _HEADER,
            0,
            self._num_written,
            load.running,
            load.waiting,
            load.kv_utilization,
            load.kv_capacity_tokens,
            load.token_budget,
            load.scheduling.held,
            load.scheduling.preempted,
            load.scheduling.relegated,
            *astuple(load.checkpoints),
            load.host_kv_bytes,
            load.host_kv_capacity_bytes,
        )

    def limits(self) -> tuple[int, int]:
        """Token budget and requests of an iteration, as the front wants them; 0 is no wish."""
        token_budget, max_running = self.get(_LIMITS, _LIMITS_AT)
        return token_budget, max_running


class StatsReader(SharedFile):
    """The front's side; makes the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        super().__init__(path, _SIZE)
        self._num_read = 0

    def load(self) -> EngineLoad:
        """The engine's load after its last iteration."""
        _, running, waiting, utilization, capacity, budget, *rest = self.get(_HEADER, 0)
        held, preempted, relegated, *copied, host_bytes, host_capacity = rest
        saved, restored, saved_bytes, restored_bytes, save_s, restore_s = copied
        return EngineLoad(
            running=running,
            waiting=waiting,
            kv_utilization=utilization,
            kv_capacity_tokens=capacity,
            token_budget=budget,
            scheduling=SchedulingTotals(held=held, preempted=preempted, relegated=relegated),
            checkpoints=CheckpointTotals(
                saved_blocks=saved,
                restored_blocks=restored,
                saved_bytes=saved_bytes,
                restored_bytes=restored_bytes,
                save_s=save_s,
                restore_s=restore_s,
            ),
            host_kv_bytes=host_bytes,
            host_kv_capacity_bytes=host_capacity,
        )

    def drain(self) -> tuple[EngineIteration, ...]:
        """Iterations since the last call, without those that were overwritten."""
        end = self._num_written()
        first = max(self._num_read, end - _NUM_RECORDS)
        self._num_read = end
        iterations = [
            EngineIteration(
                compute_tokens=compute,
                context_tokens=context,
                num_decodes=decodes,
                duration_s=duration_s,
                prefill_pairs=pairs,
            )
            for compute, context, decodes, duration_s, pairs in (
                self.get(_RECORD, _RECORDS_AT + index % _NUM_RECORDS * _RECORD.size)
                for index in range(first, end)
            )
        ]
        # What the core wrote over while this read is dropped; one more record may be half done.
        overwritten = self._num_written() + 1 - _NUM_RECORDS - first
        return tuple(iterations[max(0, overwritten) :])

    def limit(self, *, token_budget: int, max_running: int) -> None:
        """Ask the engine for these limits from its next iteration on."""
        self.put(_LIMITS, _LIMITS_AT, token_budget, max_running)

    def _num_written(self) -> int:
        (count,) = self.get(_NUMBER, 0)
        return int(count)
