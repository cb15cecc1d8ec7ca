"""Capacity of an engine of the simulated mesh, and its counters."""

from dataclasses import dataclass

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Capacity and batching of an engine in the simulated mesh."""

    kv_capacity_tokens: int
    max_running: int = 128
    token_budget: int = 256
    """
    Maximum tokens of an iteration, decodes included; above `max_running`, so that no decode waits.
    """
    static_batch: int | None = None
    """
    Number of requests of a static batch; None: continuous batching.
    """
    restore_s_per_token: Seconds = 0.0
    """Time to restore a token's KV from host memory; the whole batch waits during this time."""

    def __post_init__(self) -> None:
        if self.token_budget <= self.max_running:
            raise ValueError("token_budget must be above max_running")


@dataclass(slots=True, kw_only=True)
class BatchTotals:
    """Counters of one instance's engines; they continue over model swaps."""

    busy_s: Seconds = 0.0
    kv_share_s: Seconds = 0.0
    """Integral over time of the used share of the KV memory."""
    tokens: int = 0
    wasted_tokens: int = 0
    """Number of computed tokens whose KV was lost."""
    restored_tokens: int = 0
