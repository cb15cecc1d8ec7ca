"""
Interface between a scheduling policy and an engine: the content of one iteration.

A decision holds what stock vLLM can execute and nothing else. Decodes are always computed
first, one token each; the rest of the token budget goes to running prefills in the order in
which they were admitted, then to waiting requests in `order`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.qos import Importance, Slo
from shared.contracts.telemetry import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """Properties of a request that a policy knows when it arrives at the engine."""

    request_id: RequestId
    arrived_at: UnixTime
    prompt_tokens: int
    """Tokens to prefill: the prompt and the progress of earlier runs."""
    max_tokens: int
    """Maximum number of output tokens still to come."""
    slo: Slo
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    """Requests of one application have similar answer lengths; `*` when unknown."""

    @property
    def deadline_at(self) -> UnixTime:
        """The deadline that matters for queueing; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)


class RunningView(Protocol):
    """A running request as the engine sees it now; read-only, valid only during `decide`."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that must be computed before the next output token."""
        ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated in this run."""
        ...

    @property
    def is_prefill(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The engine before an iteration."""

    running: Sequence[RunningView]
    num_waiting: int
    max_running: int
    max_budget_tokens: int
    """Largest `token_budget` that the engine's buffers allow."""
    free_kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationDecision:
    """Content of the next iteration."""

    order: Iterable[RequestId]
    """
    Waiting requests, best first. Read as far as needed, and only until the next call on the
    policy; the engine stops at the first request that gets no KV.
    """
    token_budget: int
    """Maximum number of computed tokens, decodes included; at least 1."""
    per_request_cap: int | None = None
    """Maximum number of tokens of one prefill."""
    held: frozenset[RequestId] = frozenset()
    """Running prefills that pause in this iteration and keep their KV. Decodes cannot be held."""
    preempted: frozenset[RequestId] = frozenset()
    """Running requests that return to waiting and lose their KV, before anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOutcome:
    """Result of a decision."""

    iteration: Iteration
    admitted: tuple[RequestId, ...] = ()
    """Waiting requests that now run."""
    preempted: tuple[RequestId, ...] = ()
    """Running requests that now wait again, by decision or because KV was short."""


class SchedulingPolicy(Protocol):
    """
    An incremental state machine: cheap per iteration, however many requests wait.

    Deterministic; time comes with the calls. A request is known from `add` to `remove`.
    """

    def add(self, request: RequestView) -> None:
        """Add a request that arrived and waits."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """Remove a waiting or running request that finished or was aborted."""
        ...

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        """Learn from an iteration that took place."""
        ...

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        """Return the next iteration; total: there is always a decision."""
        ...
