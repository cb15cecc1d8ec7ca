"""
Interface between a scheduling policy and an engine: the content of one iteration.

A decision contains only operations of unmodified vLLM. Decodes are always computed first, one token
each. The remaining token budget goes to running prefills in the order of their admission, then to
waiting requests in `order`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.qos import Importance, Slo
from shared.contracts.telemetry import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """Properties of a request that are known when the request arrives at the engine."""

    request_id: RequestId
    arrived_at: UnixTime
    prompt_tokens: int
    """Number of tokens to prefill: the prompt and the tokens of earlier runs."""
    progress_tokens: int = 0
    """Number of output tokens of earlier runs, which are part of `prompt_tokens`."""
    max_tokens: int
    """Maximum number of output tokens that the request may still generate."""
    slo: Slo
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    """Application of the request, `*` if unknown, from which the answer length is predicted."""

    @property
    def deadline_at(self) -> UnixTime:
        """Deadline of the request that is used for queueing; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)


class RunningView(Protocol):
    """
    A running request in its current state on the engine; read-only, valid only during `decide`.
    """

    @property
    def request_id(self) -> RequestId: ...

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that must be computed before the request's next output token."""
        ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that the request has generated in this run."""
        ...

    @property
    def is_prefill(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """State of the engine before an iteration."""

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
    Waiting requests, the first to be served first. The engine reads as many as it needs, and stops
    at the first request that gets no KV. The iterator is invalid after the next call on the policy.
    """
    token_budget: int
    """Maximum number of tokens computed in the iteration, decodes included; at least 1."""
    per_request_cap: int | None = None
    """Maximum number of tokens that one prefill computes in the iteration."""
    held: frozenset[RequestId] = frozenset()
    """Running prefills that pause in this iteration and keep their KV. Decodes cannot be held."""
    preempted: frozenset[RequestId] = frozenset()
    """Running requests that lose their KV before the iteration and wait again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOutcome:
    """Result of an iteration: the effects of a decision on requests."""

    iteration: Iteration
    admitted: tuple[RequestId, ...] = ()
    """Requests that waited before the iteration and now run."""
    cached_tokens: Mapping[RequestId, int] = field(default_factory=dict)
    """Admitted request -> its tokens in the prefix cache, which were not computed; 0 if missing."""
    preempted: tuple[RequestId, ...] = ()
    """
    Requests that ran before the iteration and now wait again, by the decision or for lack of KV.
    """


class SchedulingPolicy(Protocol):
    """
    Scheduling policy as an incremental state machine: cheap even with many waiting requests.

    A policy is deterministic; each call passes the time. A request is known from `add` to `remove`.
    """

    def add(self, request: RequestView) -> None:
        """Add a request that arrived at the engine and waits."""
        ...

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        """
        Remove a waiting or running request.

        Args:
            answer_tokens: Length of the request's whole answer, with the tokens of earlier runs;
                None if the request was aborted.
        """
        ...

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        """Learn from an iteration that was executed."""
        ...

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        """Return the content of the next iteration; there is a decision in any state."""
        ...
