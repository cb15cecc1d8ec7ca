"""
Soft state and observations of services.

Totals never decrease for one (sender, incarnation), so lost messages are harmless.
"""

from enum import Enum

from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    Seconds,
    TenantId,
    UnixTime,
    Value,
)
from shared.contracts.qos import QosClass
from shared.contracts.requests import FinishReason, PromptText, WaitForecast
from shared.contracts.situations import LsoFacts
from shared.contracts.tenants.policies import TenantsState


class Residency(Enum):
    """Location of a model on an instance; determines the cost of activating it."""

    ACTIVE = "active"
    WARM = "warm"
    COLD = "cold"


class Capability(Enum):
    """Capability of an engine backend beyond serving."""

    MODEL_SWAP = "model_swap"
    """`activate` can replace an active model by another."""
    SCHEDULING = "scheduling"
    """The backend applies `set_scheduling` to a running engine."""
    CHECKPOINT = "checkpoint"
    """
    The backend copies the KV of requests with `checkpointed` to host memory.

    A request that starts or resumes later loads these copies instead of computing the KV again.
    """
    LAYER_PREEMPTION = "layer_preemption"
    """The backend can drop best-effort work inside a forward pass."""
    TELEMETRY = "telemetry"
    """The backend reports the iterations of its engine."""
    WARM_START = "warm_start"
    """The backend can load models into host memory before their activation, and unload them."""
    CALLS = "calls"
    """The backend answers calls, with an application of its own or a server of others."""
    RESUME = "resume"
    """A run continues after the progress of earlier runs; otherwise it begins again."""


class ActivationPath(Enum):
    """Path by which a model is activated, in order of rising cost."""

    PARKED = "parked"
    """The model's own engine already runs and is parked."""
    RELOAD = "reload"
    """The model's weights are loaded into an engine of the same shape, which held another model."""
    START = "start"
    """A new engine starts, with weights from host memory."""
    COLD = "cold"
    """A new engine starts, with weights from storage."""


class ModelState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One model that an instance can serve."""

    model: ModelName
    residency: Residency
    activate_s: Seconds = 0.0
    """Time to activate the model from its current residency, measured or assumed."""
    path: ActivationPath | None = None
    """Path by which the model would be activated; None if it is active."""
    warm_bytes: int = 0
    """Host memory that the model takes, or would take, while it is warm."""


class RegistryState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The version of the registry file that a process has read last, and what of it is missing."""

    digest: str
    """Digest of the file's content."""
    pending: dict[str, str] = {}
    """Model whose change has no effect yet -> the reason."""


class InstanceTotals(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Counters since the agent process started."""

    pulled: int = 0
    completed: int = 0
    failed: int = 0
    evicted: int = 0
    relegated: int = 0
    swaps: int = 0
    crashes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    swapped_out: int = 0
    connections_lost: int = 0
    """Lost connections to the broker, each of which returned unsettled requests to their queues."""


class PullState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Work that an instance has pulled and not started, and the bounds of this work."""

    requests: int = 0
    max_requests: int = 0
    best_effort: int = 0
    """Number of best-effort and relegated requests in `requests`."""
    max_best_effort: int = 0
    backlog_s: Seconds = 0.0
    """
    Predicted time that one more request would wait for pulled work. Only part of each long prefill
    counts.
    """
    whole_backlog_s: Seconds | None = None
    """Predicted waiting time `backlog_s` with each long prefill counted in full."""
    max_backlog_s: Seconds = 0.0
    tokens: int = 0
    """Number of KV tokens that the pulled requests are expected to need."""
    max_tokens: int = 0
    room: bool = False
    """True if the instance may pull one more request."""


class InstanceStatus(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="instance.status.v1"
):
    """Status of an agent, published every second and on changes."""

    instance_id: InstanceId
    incarnation: str
    seq: int
    at: UnixTime
    engine: str
    device: str
    model: ModelName | None = None
    """The active model of the instance."""
    activating: ModelName | None = None
    """Model that is being activated; runs of the old model `model` may still finish until then."""
    models: tuple[ModelState, ...] = ()
    """Models that the instance can serve."""
    releasing: tuple[ModelName, ...] = ()
    """
    Models that were removed from the registry, and that the instance serves until no request for
    them waits.
    """
    registry: RegistryState | None = None
    """The registry that the agent follows; None from agents of older versions."""
    plan_epoch: int = 0
    running: int = 0
    waiting: int = 0
    """Number of requests in the window: pulled, but not running."""
    max_running: int = 1
    backlog_tokens: int = 0
    backlog_s: Seconds = 0.0
    kv_utilization: float = 0.0
    kv_capacity_tokens: int = 0
    draining: bool = False
    takes_in: bool = True
    """
    True if the instance accepts requests for its model; False while it drains, swaps or restarts.
    """
    totals: InstanceTotals = InstanceTotals()
    pulled_by_lane: dict[str, int] = {}
    put: dict[str, int] = {}
    """Queue -> number of requests that the instance returned to the queue."""
    released: tuple[str, ...] = ()
    """Queues that the leader is about to delete and that this instance does not use."""
    pulled_to: dict[str, UnixTime] = {}
    """
    Lane -> enqueue time of the last request pulled from the lane; the lane's first request is not
    older.
    """
    capabilities: tuple[str, ...] = ()
    swapped_out: int = 0
    """Number of requests that were removed from the engine and will be resumed here."""
    host_kv_bytes: int = 0
    """Host memory occupied by copies of the active model's KV."""
    host_kv_capacity_bytes: int = 0
    prefill_backlog_tokens: int = 0
    """Number of the instance's prompt tokens that are not computed yet."""
    pull: PullState | None = None
    lso: LsoFacts | None = None
    """Inputs for selecting LLM serving operations; None from agents of older versions."""

    @property
    def next_model(self) -> ModelName | None:
        """
        Model whose requests this instance pulls next: the active model, unless a swap is in
        progress.
        """
        return self.activating or self.model

    @property
    def is_loading_first(self) -> bool:
        """True while no model is active and one is loaded, as after the start of an agent."""
        return self.model is None and self.activating is not None

    @property
    def source(self) -> str:
        """Unique name of the agent process in notices."""
        return source_name(self.instance_id, self.incarnation)


class LaneTotal(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Totals of requests that one grouper has put into one lane since the grouper started."""

    lane: str
    requests: int
    prompt_tokens: int
    expected_tokens: int = 0
    """Sum of the expected lengths of answers; 0 in reports of older groupers."""
    squared_prompt_tokens: float = 0.0
    interactive: int = 0
    """Number of requests with a deadline for the first token."""
    time_left_s: Seconds = 0.0
    """Sum of the times left to the requests' deadlines at arrival; 0 in best-effort lanes."""
    arrivals: tuple[tuple[UnixTime, int], ...] = ()
    """Pairs (time, number of requests that arrived until this time), both rising."""
    routed: int = 0
    """Number of requests that went to an instance's inbox instead of the lane."""


class InboxUsed(Value, frozen=True, kw_only=True):
    """Use of an instance's inbox by a grouper."""

    instance_id: InstanceId
    idle_s: Seconds
    """Time since the last request was published to the inbox."""


def source_name(sender: str, incarnation: str) -> str:
    """Unique name of a process that publishes to queues or pulls from them."""
    return f"{sender}/{incarnation}"


class LanesObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="lanes.observed.v1"
):
    """Lane totals of one grouper."""

    sender: str
    incarnation: str
    seq: int
    at: UnixTime
    layout: int
    lanes: tuple[LaneTotal, ...] = ()
    admitted: int = 0
    refused: int = 0
    inboxes: tuple[InboxUsed, ...] = ()
    """Inboxes that may hold requests; they let a new leader detect lost instances."""
    put: dict[str, int] = {}
    """
    Queue -> number of requests that the grouper has published to the queue since the grouper's
    start.
    """
    released: tuple[str, ...] = ()
    """Queues that the leader is about to delete and that this grouper does not use."""
    expired: dict[str, int] = {}
    """
    Work queue -> number of requests that the broker has dropped from the queue at their ends, of
    which this grouper has read the dead letters since its start.
    """
    tenants: TenantsState | None = None
    """The policies that the grouper follows; None without a file of policies."""

    @property
    def source(self) -> str:
        """Unique name of the grouper process in notices."""
        return source_name(self.sender, self.incarnation)


class ExpiredRequest(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A request that a grouper has ended."""

    request_id: RequestId
    tenant: TenantId


class RequestsExpired(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="requests.expired.v1"
):
    """
    Requests to whose producers a grouper has sent their ends as final replies: other groupers
    send no more replies for them.
    """

    sender: str
    requests: tuple[ExpiredRequest, ...]


class LanesPulled(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lanes.pulled.v1"):
    """An instance's recent pulls, published sooner than its next status."""

    source: str
    """Unique name of the agent process, as in its status."""
    pulled: dict[str, int]
    """
    Queue -> number of requests pulled from the queue since the start; unchanged queues are left
    out.
    """


class LeaderTick(Message, frozen=True, kw_only=True, omit_defaults=True, tag="leader.tick.v1"):
    """
    Message to the leader queue; a process that receives it is the active consumer, which is the
    leader.
    """

    sender: str
    at: UnixTime


class Iteration(Value, frozen=True, kw_only=True, array_like=True):
    """One forward pass: computed tokens, context tokens, number of decodes, duration."""

    compute_tokens: int
    context_tokens: int
    num_decodes: int
    duration_s: Seconds


class EngineIteration(Iteration, frozen=True, kw_only=True, array_like=True):
    """One forward pass as reported by its engine; `IterationsObserved` contains it in two parts."""

    prefill_pairs: float
    """
    Sum of n·(before + n/2) over the iteration's prefills, where a prefill computes n tokens
    after *before* earlier tokens.
    """

    def timed(self) -> Iteration:
        """Part of the iteration's record that receivers of all versions can decode."""
        return Iteration(
            compute_tokens=self.compute_tokens,
            context_tokens=self.context_tokens,
            num_decodes=self.num_decodes,
            duration_s=self.duration_s,
        )


class IterationsObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="iterations.observed.v1"
):
    """Sample of the iterations of an engine."""

    instance_id: InstanceId
    model: ModelName
    engine: str
    device: str
    at: UnixTime
    iterations: tuple[Iteration, ...]
    prefill_pairs: tuple[int, ...] = ()
    """Prefill pairs of each iteration, as in `EngineIteration`; empty from older agents."""


class RequestObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.observed.v1"
):
    """Observation of one finished request for the estimator, without prompt or text."""

    request_id: RequestId
    instance_id: InstanceId
    model: ModelName
    engine: str
    device: str
    application: str
    tenant: TenantId
    qos_class: QosClass
    prompt_tokens: int
    """Prompt length by the engine's tokenizer; estimated if the prompt was not tokenized."""
    output_tokens: int
    arrived_at: UnixTime
    pulled_at: UnixTime
    submitted_at: UnixTime
    first_token_at: UnixTime
    finished_at: UnixTime
    attained: bool
    outcome: str = "completed"
    """
    Outcome of the request: `completed` or the error code. Times of stages that were not reached are
    0.
    """
    evictions: int = 0
    crashes: int = 0
    cached_tokens: int = 0
    relegated: bool = False
    max_tbt_s: Seconds = 0.0
    prompt_text: PromptText | None = None
    """
    Size of the prompt text whose tokens `prompt_tokens` counts; None for token ids and estimates.
    """
    finish_reason: FinishReason | None = None
    """Finish reason of a completed request; None from agents of older versions."""
    max_tokens: int = 0
    """Output limit of the request; 0 if the agent does not report it."""
    ignore_eos: bool = False
    """True if end-of-sequence tokens did not end the generation."""
    grouped_at: UnixTime = 0.0
    """Time at which a grouper admitted the request; 0 if the agent does not report it."""
    predicted_wait: WaitForecast | None = None
    """Forecast of the time from `grouped_at` to `submitted_at`; None if there was none."""


class ModelActivated(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.activated.v1"
):
    """Duration and path of a completed model swap."""

    instance_id: InstanceId
    model: ModelName
    source: Residency
    duration_s: Seconds
    at: UnixTime
    path: ActivationPath | None = None


class LsoExecuted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lso.executed.v1"):
    """One LLM serving operation that an instance has executed, for displays."""

    instance_id: InstanceId
    at: UnixTime
    lso: str
    """Kind of the operation."""
    outcome: str
    """`LsoOutcome` as text."""
    subject: str = ""
    """Model, request or setting that the operation concerns."""
    reason: str = ""
    message: str = ""
    """What the operation did, the reason of a refusal, or the failure."""
    duration_s: Seconds = 0.0


Telemetry = (
    InstanceStatus
    | LanesObserved
    | LanesPulled
    | LeaderTick
    | IterationsObserved
    | RequestObserved
    | ModelActivated
    | LsoExecuted
)
