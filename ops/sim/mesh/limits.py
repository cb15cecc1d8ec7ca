"""What an engine of the simulated mesh can hold, and what it counts."""

from dataclasses import dataclass

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What the engine can hold, and how it batches."""

    kv_capacity_tokens: int
    max_running: int = 128
    token_budget: int = 256
    """Of an iteration, decodes included; above `max_running`, so that no decode waits."""
    static_batch: int | None = None
    """So many requests begin together and all end before the next begin; none is continuous."""
    restore_s_per_token: Seconds = 0.0
    """Of KV that comes back from host memory; all of the batch waits for it."""

    def __post_init__(self) -> None:
        if self.token_budget <= self.max_running:
            raise ValueError("the token budget must be above the most running requests")


@dataclass(slots=True, kw_only=True)
class BatchTotals:
    """Counters of one engine, kept over model swaps."""

    busy_s: Seconds = 0.0
    kv_share_s: Seconds = 0.0
    """Integral of the used part of the KV memory."""
    tokens: int = 0
    wasted_tokens: int = 0
    """Computed and then lost."""
    restored_tokens: int = 0
