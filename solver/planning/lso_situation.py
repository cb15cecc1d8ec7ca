"""What the choice of LSOs depends on, as values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.plans import Segment
from shared.contracts.telemetry import Residency
from solver.planning.evict_or_swap import KvCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWork:
    """A request on the engine."""

    request_id: RequestId
    lane: str
    context_tokens: int
    """Prompt and answer so far: what has KV, or soon has."""
    held_tokens: int
    """KV tokens that are free when it leaves."""
    gives_way: bool = False
    """Best effort or relegated."""
    remaining_s: Seconds | None = None
    """Predicted until its end; none when nobody can tell."""
    slack_s: Seconds = math.inf
    """How long it may stand still and be in time; infinite when nobody can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedWork:
    """A request that was swapped out and waits to be resumed here."""

    request_id: RequestId
    needed_tokens: int
    """KV tokens at its end."""
    rested: bool = True
    """Whether it may be resumed by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the head's waiting work needs of the engine at once."""

    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSet:
    """Models in host memory, and how much of it they may fill."""

    residency: Mapping[ModelName, Residency] = field(default_factory=dict)
    """Of all models that the instance can serve."""
    num_bytes: Mapping[ModelName, int] = field(default_factory=dict)
    """Host memory that each takes when it is warm."""
    budget_bytes: int = 0
    """For all warm models; 0 when the engine brings none in ahead of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One instance when its virtual queue changes."""

    active: ModelName | None
    costs: KvCosts
    running: tuple[RunningWork, ...] = ()
    swapped: tuple[SwappedWork, ...] = ()
    """All of the active model: what is swapped out leaves with it."""
    demand: Demand = Demand()
    free_tokens: int = 0
    """KV tokens that nothing running may need."""
    free_slots: int = 0
    host_kv_free_bytes: int = 0
    warm_set: WarmSet = field(default_factory=WarmSet)
    activate_s: Mapping[ModelName, Seconds] = field(default_factory=dict)
    """What making each model active takes from here, as far as it is known."""
    drain_limit_s: Seconds = 0.0
    return_s: Seconds = 0.0
    """What having the active model once more would cost: another drain and its activation."""
    pull_room: int = 0
    """Requests that the bounds allow to pull now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChange:
    """A new virtual queue, and the head that it replaces."""

    old_head: Segment | None
    queue: tuple[Segment, ...]
    """Of models that the instance can serve."""

    @property
    def head(self) -> Segment | None:
        return self.queue[0] if self.queue else None
