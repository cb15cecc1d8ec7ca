"""Capacity of a simulated engine, and its counters."""

from dataclasses import dataclass, field

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Capacity of a simulated engine."""

    max_running: int = 256
    max_budget_tokens: int = 8192
    kv_capacity_tokens: int = 400_000
    block_tokens: int = 16
    prefill_only: bool = False
    """True: a request ends with its first token, because decodes run elsewhere."""


PACE_ITERATIONS = 50


@dataclass(slots=True)
class EngineTotals:
    """Counters of one simulated replica."""

    busy_s: Seconds = 0.0
    num_iterations: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    wasted_tokens: int = 0
    """Number of tokens that were computed and then lost by preemption."""
    num_preempted: int = 0
    pace_s: Seconds = 0.0
    """Mean duration of the latest iterations of the replica."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Number of tokens and number of decodes of each iteration, if recorded."""

    def count(self, duration_s: Seconds, tokens: int, num_decodes: int) -> None:
        """Add one iteration to the counters."""
        self.busy_s += duration_s
        self.num_iterations += 1
        self.pace_s += (duration_s - self.pace_s) / min(self.num_iterations, PACE_ITERATIONS)
        self.tokens += tokens
        self.prefill_tokens += tokens - num_decodes
