"""Inputs for selecting LLM serving operations, as values."""

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
    """Number of KV tokens that are freed when the request leaves the engine."""
    gives_way: bool = False
    """True if the request is best effort or relegated, so that regular requests may displace it."""
    begins_first: bool = False
    """True if the request would begin again before all requests that wait on the instance."""
    remaining_s: Seconds | None = None
    """Predicted time until the end of the request's run; none if unknown."""
    slack_s: Seconds = math.inf
    """Longest pause after which the request is still in time; infinite if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedWork:
    """A swapped-out request that waits to be resumed on this instance."""

    request_id: RequestId
    needed_tokens: int
    """Number of KV tokens that the request needs at the end of its answer."""
    rested: bool = True
    """True if the request may be resumed without a `SwapIn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Number of KV tokens and running slots that the head's waiting requests need on the engine."""

    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSet:
    """Models in host memory, and the limit of this memory."""

    residency: Mapping[ModelName, Residency] = field(default_factory=dict)
    """Residency of all models that the instance can serve."""
    num_bytes: Mapping[ModelName, int] = field(default_factory=dict)
    """Host memory of each model while it is warm, in bytes."""
    budget_bytes: int = 0
    """Host memory for all warm models, in bytes; 0 if the engine loads no models ahead of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """State of one instance at the time when its virtual queue changes."""

    active: ModelName | None
    costs: KvCosts
    running: tuple[RunningWork, ...] = ()
    swapped: tuple[SwappedWork, ...] = ()
    """Swapped-out requests of the active model; a swap to another model evicts these requests."""
    demand: Demand = Demand()
    free_tokens: int = 0
    """Number of KV tokens that no running request will need."""
    free_slots: int = 0
    host_kv_free_bytes: int = 0
    warm_set: WarmSet = field(default_factory=WarmSet)
    activate_s: Mapping[ModelName, Seconds] = field(default_factory=dict)
    """Activation time of each model from the current state; unknown times are absent."""
    drain_limit_s: Seconds = 0.0
    return_s: Seconds = 0.0
    """Cost of activating the present model again later: another drain and another activation."""
    pull_room: int = 0
    """Number of requests that may be pulled now."""
    resumes: bool = True
    """False if an evicted run loses its tokens, because the engine begins each answer again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChange:
    """A new virtual queue of an instance, and the head of its old queue."""

    old_head: Segment | None
    queue: tuple[Segment, ...]
    """Segments of the new queue, without segments of models that the instance cannot serve."""

    @property
    def head(self) -> Segment | None:
        return self.queue[0] if self.queue else None
