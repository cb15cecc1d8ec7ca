"""
The seam between a scheduling policy and an engine: what one iteration computes.

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
    """What a policy knows of a request when it arrives at the engine."""

    request_id: RequestId
    arrived_at: UnixTime
    prompt_tokens: int
    """Tokens to prefill: the prompt and the progress of earlier runs."""
    max_tokens: int
    """Output tokens still to come at most."""
    slo: Slo
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    """Whose answers are alike in length; `*` when unknown."""

    @property
    def deadline_at(self) -> UnixTime:
        """The deadline that queueing is about; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)


class RunningView(Protocol):
    """A running request as the engine sees it now; read-only, valid during `decide` only."""

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
        """Generated in this run."""
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
    """What the next iteration computes."""

    order: Iterable[RequestId]
    """
    Waiting requests, best first. Read as far as needed, and only until the next call on the
    policy; the engine stops at the first request that gets no KV.
    """
    token_budget: int
    """Tokens computed at most, decodes included; at least 1."""
    per_request_cap: int | None = None
    """Tokens of one prefill at most."""
    held: frozenset[RequestId] = frozenset()
    """Running prefills that rest this iteration and keep their KV. Decodes cannot be held."""
    preempted: frozenset[RequestId] = frozenset()
    """Running requests that go back to waiting and lose their KV, before anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOutcome:
    """What came of a decision."""

    iteration: Iteration
    admitted: tuple[RequestId, ...] = ()
    """Waiting requests that now run."""
    preempted: tuple[RequestId, ...] = ()
    """Running requests that now wait again, by decision or for want of KV."""


class SchedulingPolicy(Protocol):
    """
    An incremental state machine: cheap per iteration, however many requests wait.

    Deterministic; time comes with the calls. A request is known from `add` to `remove`.
    """

    def add(self, request: RequestView) -> None:
        """A request arrived and waits."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """A waiting or running request finished or was aborted."""
        ...

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        """An iteration took place."""
        ...

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        """The next iteration; total: there is always a decision."""
        ...
