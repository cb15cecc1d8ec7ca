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
    """Tokens of the prompt and the answer so far, including tokens whose KV is not computed yet."""
    held_tokens: int
    """KV tokens that are freed when the request leaves."""
    gives_way: bool = False
    """True for a best-effort or relegated request."""
    remaining_s: Seconds | None = None
    """Predicted time until the end of the run; none when unknown."""
    slack_s: Seconds = math.inf
    """Longest pause after which the request is still in time; infinite when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedWork:
    """A swapped-out request that waits to be resumed on this instance."""

    request_id: RequestId
    needed_tokens: int
    """KV tokens that the request needs at the end of its answer."""
    rested: bool = True
    """True if the request may be resumed without a `SwapIn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """KV tokens and running slots that the head's waiting work needs on the engine."""

    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSet:
    """Models in host memory, and the limit of their host memory."""

    residency: Mapping[ModelName, Residency] = field(default_factory=dict)
    """Residency of all models that the instance can serve."""
    num_bytes: Mapping[ModelName, int] = field(default_factory=dict)
    """Host memory of each model when it is warm."""
    budget_bytes: int = 0
    """Limit for all warm models; 0 when the engine loads none ahead of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """State of one instance at the time when its virtual queue changes."""

    active: ModelName | None
    costs: KvCosts
    running: tuple[RunningWork, ...] = ()
    swapped: tuple[SwappedWork, ...] = ()
    """Swapped-out requests of the active model; they are evicted when the model is replaced."""
    demand: Demand = Demand()
    free_tokens: int = 0
    """KV tokens that no running request may need."""
    free_slots: int = 0
    host_kv_free_bytes: int = 0
    warm_set: WarmSet = field(default_factory=WarmSet)
    activate_s: Mapping[ModelName, Seconds] = field(default_factory=dict)
    """Activation time of each model from the current state; unknown times are absent."""
    drain_limit_s: Seconds = 0.0
    return_s: Seconds = 0.0
    """Cost of activating the present model again later: another drain and its activation."""
    pull_room: int = 0
    """Number of requests that may be pulled now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChange:
    """A new virtual queue, and the head of the old queue."""

    old_head: Segment | None
    queue: tuple[Segment, ...]
    """Segments of the new queue, without segments of models that the instance cannot serve."""

    @property
    def head(self) -> Segment | None:
        return self.queue[0] if self.queue else None
