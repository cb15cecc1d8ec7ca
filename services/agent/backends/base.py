"""
The interface between the agent and an LLM engine.

The docstrings here are the contract, and `tests/contract/engine/test_engine_backend.py` tests every
backend against it. A backend without a capability refuses that operation with `UnsupportedError`
and still serves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from services.agent.backends.totals import CheckpointTotals, SchedulingTotals
from shared.contracts.base import ModelName, RequestId, Seconds, TenantId, UnixTime
from shared.contracts.errors import MeshError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import (
    FinishReason,
    Progress,
    Sampling,
    StepDetails,
    Tokens,
)
from shared.contracts.telemetry import Capability, EngineIteration, ModelState

_ALWAYS = frozenset(
    {
        Capability.MODEL_SWAP,
        Capability.WARM_START,
        Capability.RESUME,
        Capability.SCHEDULING,
        Capability.TELEMETRY,
    }
)


def capabilities_with(optional: Mapping[Capability, object]) -> frozenset[Capability]:
    """
    Return the capabilities common to all backends, and the *optional* ones whose value is true.
    """
    return _ALWAYS | {capability for capability, present in optional.items() if present}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """A call that a run answers."""

    endpoint: str
    body: bytes
    streams: bool = False
    """True if the outputs have the answer's text as it is generated."""
    events: bool = False
    """True if the outputs have the server-sent events of the answer, and no response is asked."""
    joins: bool = True
    """
    True if an event may have the text of several tokens; False if an earlier run may have sent
    events of which nothing is known.
    """
    stream_options: bytes | None = None
    seed: int
    """Seed of random answers whose body has none; each answer has another seed."""
    children: tuple[Progress, ...] = ()
    """Progress of each answer that earlier runs have begun."""


class EnginePayload(msgspec.Struct, frozen=True):
    """
    vLLM's encoded request without the tokens of the prompt, or the list of these requests if the
    model pools.
    """

    parts: tuple[bytes, ...]
    """Buffers of vLLM's encoder: the request, and one buffer per large tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """
    One generation task in tokens. The engine continues after `progress`, the tokens of earlier
    runs.
    """

    request_id: RequestId
    """Id of this run: the agent gives each run of a request a new id."""
    origin: RequestId | None = None
    """Id of the request whose run this is; None if the request has only this run."""
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
    """Application of the request; answers of one application have similar lengths. `*`: unknown."""
    priority: int | None = None
    """
    Priority for engines that order by priority, higher first. None: the backend derives it from the
    QoS class.
    """
    adapter: str | None = None
    payload: EnginePayload | None = None
    """All sampling parameters, for vLLM; None: `sampling` has all of them."""
    call: EngineCall | None = None
    """The call; then `prompt` and `progress` are empty, and `sampling` is not used."""
    input_lengths: tuple[int, ...] = ()
    """
    Number of tokens of each input, whose tokens `prompt` has in order, if the model pools. The
    engine then generates nothing: its only output has the details of each input, in their order, or
    none if it cannot compute them.
    """
    checkpointed: bool = False
    """True if the run's KV is copied to host memory; ignored by backends without checkpoints."""
    expires_at: UnixTime | None = None
    """
    Time from which no token of the run is computed; the agent aborts the run then. Backends whose
    iterations others decide ignore it.
    """
    first_token_by: UnixTime | None = None
    """The same, for a run that has no token then."""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """
    New tokens of a run, in order. The last output of a run has `finish_reason`.

    In a run of a call, outputs with `child` are those of its answers, each of which ends with a
    `finish_reason`; the last output of the run has `response`.
    """

    token_ids: Tokens
    text: str = ""
    """Text of the tokens, if only the engine knows it."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """
    Prompt tokens whose KV was cached, so that the engine did not compute them; set on the first
    output.
    """
    prefill_s: Seconds = 0.0
    """
    Time from first scheduling to first token, without preempted time. Set on the first output, if
    known.
    """
    details: tuple[StepDetails, ...] = ()
    """
    Details of all of `token_ids`, or none; of a response, the events of all steps, those of earlier
    runs included.
    """
    child: int | None = None
    """Index of the answer of a call."""
    prompt_tokens: int = 0
    """Length of the answer's prompt; set on the first output of an answer of a call."""
    response: bytes | None = None
    """The response of a call."""

    @property
    def is_last(self) -> bool:
        """True for the last output of a run."""
        return self.response is not None or (self.finish_reason is not None and self.child is None)


class NewOutput(msgspec.Struct, frozen=True):
    """New tokens of a run; the run has ended if the output is its last."""

    request_id: RequestId
    output: EngineOutput


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended without a last output."""

    request_id: RequestId
    error: MeshError | None = None
    """
    None: the run was aborted. Otherwise a `ContractError` with vLLM's status and field if the body
    of a call is invalid, or an `EngineError`: the engine does not support a field, or died.
    """


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine died; `RunEnded` of each of its runs follows."""

    message: str


EngineEvent = NewOutput | RunEnded | EngineLost
Listener = Callable[[Sequence[EngineEvent]], None]
"""Function that receives the events of one turn of the engine. It does not block or raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one engine. The token counts include prompts and outputs."""

    running: int = 0
    waiting: int = 0
    kv_utilization: float = 0.0
    kv_capacity_tokens: int = 0
    token_budget: int = 0
    """Token budget of the engine's last iteration."""
    max_running: int = 0
    """Maximum number of requests in one iteration."""
    scheduling: SchedulingTotals = field(default_factory=SchedulingTotals)
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
    host_kv_bytes: int = 0
    """Host memory occupied by copies of the active model's KV."""
    host_kv_capacity_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot(EngineLoad):
    """State of a backend and its active engine; totals cover all engines since the start."""

    model: ModelName | None
    models: tuple[ModelState, ...] = ()
    warm_capacity_bytes: int = 0
    """Host memory for all warm models."""
    spare_running: int = 0
    """Requests beyond `max_running` by which a server is tried that may have more places."""
    most_run: int | None = None
    """Most requests that a server was seen to run at once; None: the engine has `max_running`."""
    longest_gap_s: Seconds = math.inf
    """Longest recent time between two tokens of an answer; infinite if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParameters:
    """Runtime limits of an engine."""

    token_budget: int
    """Maximum number of tokens computed in one iteration."""
    max_running: int


@dataclass(slots=True, kw_only=True)
class EngineIdentity:
    """Kind of engine and device: the key of profiles."""

    engine: str
    """Name of the engine and, if known, its version: `vllm-0.32.0`, `simulated`."""
    device: str
    """Name of the device on which the engine runs: `cpu`, `NVIDIA H200`."""
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
        Begin the start of the engine and return immediately; `start` waits for the result.
        Optional.

        Raises:
            EngineError: The engine can never start; the message says what to do.
        """
        ...

    async def start(self) -> None:
        """
        Start the engine, without a model.

        Raises:
            EngineError: The engine cannot start; the message says what to do.
        """
        ...

    def add(self, entry: ModelEntry) -> None:
        """Add a model, which is cold; running requests are not affected."""
        ...

    def replace(self, entry: ModelEntry) -> None:
        """Replace the entry of a known model, of which only names and adapters have changed."""
        ...

    async def remove(self, model: ModelName) -> None:
        """
        Forget a model and release its memory, also if it is active. No request of it may run.

        Raises:
            EngineError: The model is unknown, requests of it are running, or the engine died.
        """
        ...

    async def activate(self, model: ModelName) -> Seconds:
        """
        Activate *model* by the cheapest path. No request may be running.

        Returns:
            Duration in seconds; 0 if the model was already active.

        Raises:
            EngineError: The model is unknown, requests are running, or the engine died.
        """
        ...

    async def warm(self, model: ModelName) -> Seconds:
        """
        Load *model* into host memory so that a later activation is fast; other models keep serving.

        Returns:
            Duration in seconds; 0 if the model was already active or warm.

        Raises:
            NoRoomError: The model does not fit beside the warm models, none of which is removed.
            UnsupportedError: The backend cannot warm models.
            EngineError: The model is unknown or cannot be loaded.
        """
        ...

    async def cool(self, model: ModelName) -> None:
        """
        Unload *model* from host memory; no-op if it is cold.

        Raises:
            UnsupportedError: The backend cannot warm models.
            EngineError: The model is unknown or active.
        """
        ...

    def listen(self, listener: Listener) -> None:
        """Send events to *listener* from now on, instead of to the listener before."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """
        Begin to run *request* on the active model.

        Its outputs follow as events, perhaps before this call returns. The last event of a run is
        an output with a `finish_reason`, or with the response of a call, or `RunEnded`.

        Token i of a greedy request depends only on the model, the prompt and earlier tokens, so
        evicting and resuming at any point gives the same answer.

        Raises:
            NotActiveError: Another model is active, or is being activated.
            EngineError: The request is not supported, runs already, or the engine is dead
                (`engine_dead`). No event of the run follows.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """
        End a run and free its KV; `RunEnded` follows, perhaps before this call returns.

        Unknown and finished runs are ignored.
        """
        ...

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        """
        Change the scheduling of the running engine.

        Raises:
            UnsupportedError: The backend cannot change its scheduling.
        """
        ...

    async def clear_caches(self) -> None:
        """
        Drop all KV that no running request owns: prefix caches and host copies.

        Raises:
            EngineError: The engine is not running.
        """
        ...

    async def preempt_now(self) -> bool:
        """
        Drop the best-effort part of the running iteration at the next safepoint.

        The other requests of the iteration are still computed.

        Returns:
            True if the iteration has a best-effort part. That part is still computed if no
            safepoint follows.

        Raises:
            UnsupportedError: The backend has no safepoints.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """
        Return the current state of the backend; the call is cheap and never waits for the engine.
        """
        ...

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
        """
        Return the iterations since the last call; if there are more than the buffer holds, only the
        newest.
        """
        ...

    @property
    def alive(self) -> bool:
        """False after the engine died; `start` then starts a new engine without a model."""
        ...

    async def close(self) -> None:
        """Stop the engine and all processes that it started; idempotent."""
        ...
