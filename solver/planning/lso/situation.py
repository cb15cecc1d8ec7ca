"""Inputs of the choice of LSOs, as values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.plans import Segment
from shared.contracts.telemetry import Residency
from solver.planning.lso.evict_or_swap import KvCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWork:
    """A request on the engine."""

    request_id: RequestId
    lane: str
    context_tokens: int
    """Prompt and answer so far: tokens that have KV or soon will."""
    held_tokens: int
    """KV tokens that are freed when the request leaves."""
    gives_way: bool = False
    """True for a best-effort or relegated request."""
    remaining_s: Seconds | None = None
    """Predicted time until its end; none when unknown."""
    slack_s: Seconds = math.inf
    """Time that the request may pause and still be in time; infinite when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedWork:
    """A swapped-out request that waits to be resumed here."""

    request_id: RequestId
    needed_tokens: int
    """KV tokens that it needs at its end."""
    rested: bool = True
    """True if it may be resumed without a `SwapIn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Tokens and slots that the head's waiting work needs on the engine at the same time."""

    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSet:
    """Models in host memory, and the memory that they may fill."""

    residency: Mapping[ModelName, Residency] = field(default_factory=dict)
    """Residency of all models that the instance can serve."""
    num_bytes: Mapping[ModelName, int] = field(default_factory=dict)
    """Host memory of each model when it is warm."""
    budget_bytes: int = 0
    """Limit for all warm models; 0 when the engine loads none ahead of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One instance when its virtual queue changes."""

    active: ModelName | None
    costs: KvCosts
    running: tuple[RunningWork, ...] = ()
    swapped: tuple[SwappedWork, ...] = ()
    """Swapped-out requests, all of the active model: they leave with their model."""
    demand: Demand = Demand()
    free_tokens: int = 0
    """KV tokens that no running request may need."""
    free_slots: int = 0
    host_kv_free_bytes: int = 0
    warm_set: WarmSet = field(default_factory=WarmSet)
    activate_s: Mapping[ModelName, Seconds] = field(default_factory=dict)
    """Time to make each model active from the current state, as far as it is known."""
    drain_limit_s: Seconds = 0.0
    return_s: Seconds = 0.0
    """Cost of activating the active model once more: another drain and its activation."""
    pull_room: int = 0
    """Requests that the bounds allow to pull now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChange:
    """A new virtual queue, and the head that it replaces."""

    old_head: Segment | None
    queue: tuple[Segment, ...]
    """Only segments of models that the instance can serve."""

    @property
    def head(self) -> Segment | None:
        return self.queue[0] if self.queue else None
