"""
The seam between the agent and an LLM engine.

The docstrings here are the contract; `tests/contract/test_engine_backend.py` runs it against
every implementation. A backend without a capability refuses that operation with
`UnsupportedError` and still serves.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.agent.backends.totals import CheckpointTotals, SchedulingTotals
from shared.contracts.base import ModelName, RequestId, Seconds, TenantId, UnixTime
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import FinishReason, Sampling, Tokens
from shared.contracts.telemetry import EngineIteration, ModelState


class Capability(Enum):
    """What a backend can do beyond serving."""

    MODEL_SWAP = "model_swap"
    """`activate` works while other models have been active before."""
    SCHEDULING = "scheduling"
    """Obeys `set_scheduling` on a running engine."""
    CHECKPOINT = "checkpoint"
    """
    Copies the KV of requests with `checkpointed` to host memory. Any request that begins then or
    comes back takes what it can from there instead of computing it.
    """
    LAYER_PREEMPTION = "layer_preemption"
    """Drops best-effort work inside a forward pass."""
    TELEMETRY = "telemetry"
    """Reports iterations."""
    WARM_START = "warm_start"
    """Brings models into host memory ahead of time, and gives them up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One generation, in tokens. `progress` was generated before and is not generated again."""

    request_id: RequestId
    """Of this run: the agent names each run of a request anew."""
    origin: RequestId | None = None
    """The request of which this is a run; none is one that has no other."""
    model: ModelName
    prompt: Tokens
    sampling: Sampling
    progress: Tokens = ()
    stop_token_ids: Tokens = ()
    slo: Slo = field(default_factory=Slo)
    arrived_at: UnixTime = 0.0
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    """Whose answers are alike in length; `*` when unknown."""
    priority: int | None = None
    """Smaller first, for engines that order by such a number; none is by QoS class."""
    adapter: str | None = None
    checkpointed: bool = False
    """Copy its KV to host memory as it grows, where the backend can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """New tokens of a run, in order. The last output of a run has `finish_reason`."""

    token_ids: Tokens
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens that needed no computing; set on the first output."""
    prefill_s: Seconds = 0.0
    """First scheduled to first token, without time preempted; on the first output, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State now. Token counts cover prompt and output."""

    model: ModelName | None
    running: int
    waiting: int
    kv_utilization: float
    kv_capacity_tokens: int
    max_running: int
    models: tuple[ModelState, ...] = ()
    warm_capacity_bytes: int = 0
    """Host memory for all warm models."""
    token_budget: int = 0
    """Of the last iteration."""
    scheduling: SchedulingTotals = field(default_factory=SchedulingTotals)
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
    host_kv_bytes: int = 0
    """Host memory that copies of the active model's KV take."""
    host_kv_capacity_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParameters:
    """Knobs of a running engine."""

    token_budget: int
    """Most tokens computed in one iteration."""
    max_running: int


@dataclass(slots=True, kw_only=True)
class EngineIdentity:
    """What profiles are keyed by."""

    engine: str
    """E.g. `vllm-0.32.0`, `simulated`."""
    device: str
    """E.g. `cpu`, `NVIDIA H200`."""
    capabilities: frozenset[Capability] = field(default_factory=frozenset)


class EngineBackend(Protocol):
    """
    One LLM serving instance.

    At most one model is active. All methods are called from one event loop and never block
    it for long.
    """

    @property
    def identity(self) -> EngineIdentity: ...

    async def prepare(self) -> None:
        """
        Begin what `start` will wait for, and return at once; optional.

        Raises:
            EngineError: It can never start; the message says what to do.
        """
        ...

    async def start(self) -> None:
        """
        Bring the engine up, without a model.

        Raises:
            EngineError: It cannot start; the message says what to do.
        """
        ...

    async def activate(self, model: ModelName) -> Seconds:
        """
        Make *model* the active one, however that is cheapest. Nothing may be running.

        Returns:
            Seconds it took; 0 when it was active already.

        Raises:
            EngineError: Unknown model, or requests are running, or the engine died.
        """
        ...

    async def warm(self, model: ModelName) -> Seconds:
        """
        Bring *model* into host memory, so that activating it is cheap, while others are served.

        Returns:
            Seconds it took; 0 when it was active or warm already.

        Raises:
            NoRoomError: Warm models fill their part of host memory; none gives way for another.
            UnsupportedError: No such capability.
            EngineError: Unknown model, or it cannot be loaded.
        """
        ...

    async def cool(self, model: ModelName) -> None:
        """
        Take *model* out of host memory; nothing happens when it is cold.

        Raises:
            UnsupportedError: No such capability.
            EngineError: Unknown model, or it is active.
        """
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """
        Run *request* on the active model and yield tokens as they come.

        Token i of a greedy request depends on the model, prompt and earlier tokens only, so
        evicting and resuming anywhere gives the same answer. The iterator ends after the
        output with a `finish_reason`, or without one when the request was aborted.

        Raises:
            NotActiveError: Another model is active, or is being activated.
            EngineError: A sampling field cannot be honoured; with
                `engine_dead`, the engine died under the request.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """
        End a run. Its iterator ends after yielding what was generated; frees its KV.

        Unknown and finished requests are ignored.
        """
        ...

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        """
        Change the scheduling of the running engine.

        Raises:
            UnsupportedError: No such capability.
        """
        ...

    async def clear_caches(self) -> None:
        """
        Forget all KV that no running request owns: prefix caches and host copies.

        Raises:
            EngineError: The engine is not running.
        """
        ...

    async def preempt_now(self) -> bool:
        """
        Drop the best-effort part of the running iteration at the next safepoint.

        The rest of the iteration is computed, and nothing of what was dropped counts.

        Returns:
            Whether there is such a part; without a safepoint to come it may still be computed.

        Raises:
            UnsupportedError: No such capability.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """State now; cheap, never waits for the engine."""
        ...

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
        """Iterations since the last call, oldest dropped first when too many."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine has died; `start` brings it up again, without a model."""
        ...

    async def close(self) -> None:
        """Stop the engine and everything it started; idempotent."""
        ...
