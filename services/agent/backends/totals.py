"""Totals of a backend over all models: counters that never decrease."""

from dataclasses import dataclass, field, fields
from typing import Self

from shared.contracts.base import Seconds


class _Sum:
    """Addition for dataclasses whose fields are numbers or dataclasses of the same kind."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{
                each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self)  # type: ignore[arg-type]  # dataclasses all
            }
        )


@dataclass(slots=True, kw_only=True)
class SchedulingTotals(_Sum):
    """Counters of the scheduling policy since the backend started, over all models."""

    held: int = 0
    """Number of prefills held for an iteration with their KV kept; counted once per iteration."""
    preempted: int = 0
    """
    Number of requests that lost their KV because the policy preempted them or memory was short.
    """
    relegated: int = 0
    """Number of ended requests that the scheduling policy had relegated."""
    layer_preemptions: int = 0
    """Number of iterations whose best-effort part was dropped on demand, between two layers."""
    dropped_tokens: int = 0
    """Number of best-effort tokens that were scheduled in an iteration and then dropped."""
    yield_s: Seconds = 0.0
    """Sum of the times from each demand for layer preemption to the safepoint that follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTotals(_Sum):
    """KV copied to host memory and back since the backend started, over all models."""

    saved_blocks: int = 0
    restored_blocks: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    save_s: Seconds = 0.0
    """Time that copies to host memory took in the engine's own thread."""
    restore_s: Seconds = 0.0
    """Time of copies from host memory; they may overlap the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals(_Sum):
    """Totals of one or more engines."""

    scheduling: SchedulingTotals = field(default_factory=SchedulingTotals)
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
