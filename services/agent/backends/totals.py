"""What a backend has done so far: numbers that only grow, whichever model is active."""

from dataclasses import dataclass, field, fields
from typing import Self

from shared.contracts.base import Seconds


class _Sum:
    """Of dataclasses whose fields are numbers, or such sums themselves."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{
                each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self)  # type: ignore[arg-type]  # dataclasses all
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingTotals(_Sum):
    """What the scheduling policy has done since the backend began, with whatever models."""

    held: int = 0
    """Prefills that rested for an iteration and kept their KV, once per iteration."""
    preempted: int = 0
    """Requests that lost their KV, by decision or for want of memory."""
    relegated: int = 0
    """Requests that ended relegated."""
    layer_preemptions: int = 0
    """Iterations that lost their best-effort part on demand, between two layers."""
    dropped_tokens: int = 0
    """Best-effort tokens that were scheduled in an iteration and dropped."""
    yield_s: Seconds = 0.0
    """From demands for layer-wise preemption to their safepoints, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTotals(_Sum):
    """KV copied to host memory and back since the backend began, of whatever models."""

    saved_blocks: int = 0
    restored_blocks: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    save_s: Seconds = 0.0
    """Of the engine's own time."""
    restore_s: Seconds = 0.0
    """Of copying, which may go on beside the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals(_Sum):
    """Of one engine, or of several."""

    scheduling: SchedulingTotals = field(default_factory=SchedulingTotals)
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
