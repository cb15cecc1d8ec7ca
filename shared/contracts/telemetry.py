"""
Soft state and observations.

Totals are monotone per (sender, incarnation), so that losing a message hurts nobody.
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


class Residency(Enum):
    """Where a model is, seen from one instance; decides what activating it costs."""

    ACTIVE = "active"
    WARM = "warm"
    COLD = "cold"


class ActivationPath(Enum):
    """How a model gets active; dearer from one to the next."""

    PARKED = "parked"
    """Its engine is up and rests."""
    RELOAD = "reload"
    """Its weights go into an engine that held another model of the same shape."""
    START = "start"
    """In a new engine, with weights from host memory."""
    COLD = "cold"
    """In a new engine, with weights from storage."""


class ModelState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One model that an instance can serve."""

    model: ModelName
    residency: Residency
    activate_s: Seconds = 0.0
    """Measured, or the prior, time to make it active from here."""
    path: ActivationPath | None = None
    """How that would be done; nothing when it is active."""
    warm_bytes: int = 0
    """Host memory that it takes, or would take, while it is warm."""


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


class PullState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance has pulled and not begun, and the bounds on that."""

    requests: int = 0
    max_requests: int = 0
    filler: int = 0
    """Of these, best-effort and relegated ones."""
    max_filler: int = 0
    backlog_s: Seconds = 0.0
    """Predicted work that one more would wait for, each long prefill counted in part."""
    whole_backlog_s: Seconds | None = None
    """As before, long prefills counted whole."""
    max_backlog_s: Seconds = 0.0
    tokens: int = 0
    """KV tokens that it may need."""
    max_tokens: int = 0
    room: bool = False
    """Whether one more may be pulled."""


class InstanceStatus(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="instance.status.v1"
):
    """An agent's heartbeat, each second and on change."""

    instance_id: InstanceId
    incarnation: str
    seq: int
    at: UnixTime
    engine: str
    device: str
    model: ModelName | None = None
    """The resident model."""
    models: tuple[ModelState, ...] = ()
    plan_epoch: int = 0
    running: int = 0
    waiting: int = 0
    """Requests in the window, pulled but not running."""
    max_running: int = 1
    backlog_tokens: int = 0
    backlog_s: Seconds = 0.0
    kv_utilization: float = 0.0
    kv_capacity_tokens: int = 0
    draining: bool = False
    takes_in: bool = True
    """Whether it takes requests for its model now: it neither drains, swaps nor restarts."""
    totals: InstanceTotals = InstanceTotals()
    pulled_by_lane: dict[str, int] = {}
    pulled_to: dict[str, UnixTime] = {}
    """When the last request pulled from each lane was put there; its head came no earlier."""
    capabilities: tuple[str, ...] = ()
    swapped_out: int = 0
    """Of those waiting: taken off the engine, to be resumed here."""
    host_kv_bytes: int = 0
    """Host memory that copies of the active model's KV take."""
    host_kv_capacity_bytes: int = 0
    prefill_backlog_tokens: int = 0
    """Of prompts in its hands, those not computed yet."""
    pull: PullState | None = None
    lso: LsoFacts | None = None
    """What operations are chosen by; agents of older versions do not say."""


class LaneTotal(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What one grouper has put into one lane since it started; all are sums over requests."""

    lane: str
    requests: int
    prompt_tokens: int
    max_tokens: int
    squared_prompt_tokens: float = 0.0
    interactive: int = 0
    """Of the requests, those whose first token has a deadline."""
    time_left_s: Seconds = 0.0
    """To the deadlines, when the requests came; 0 in best-effort lanes."""
    arrivals: tuple[tuple[UnixTime, int], ...] = ()
    """Points (time, requests until then) of when they were put there, both rising."""
    routed: int = 0
    """Of the requests, those that went to an instance's inbox instead."""


class WorkTotal(Value, frozen=True, kw_only=True):
    """How much work one grouper's requests for a model were, since it started."""

    model: ModelName
    bins: tuple[tuple[int, int], ...]
    """Bin of `solver.planning.work_classes` and requests in it, rising."""


class LanesObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="lanes.observed.v1"
):
    """A grouper's lane totals."""

    sender: str
    incarnation: str
    seq: int
    at: UnixTime
    layout: int
    lanes: tuple[LaneTotal, ...] = ()
    work: tuple[WorkTotal, ...] = ()
    work_version: int = 0
    """Of the edges that the grouper classifies by."""
    work_edges: dict[str, int] = {}
    """These edges, by model; a new leader goes on from them."""
    admitted: int = 0
    refused: int = 0


class LeaderTick(Message, frozen=True, kw_only=True, omit_defaults=True, tag="leader.tick.v1"):
    """Keeps the leader's queue moving, so that a fresh active consumer learns its role."""

    sender: str
    at: UnixTime


class Iteration(Value, frozen=True, kw_only=True, array_like=True):
    """One forward pass: tokens computed, context they attended to, decodes in it, time."""

    compute_tokens: int
    context_tokens: int
    num_decodes: int
    duration_s: Seconds


class EngineIteration(Iteration, frozen=True, kw_only=True, array_like=True):
    """One forward pass as its engine knows it; `IterationsObserved` tells it in two parts."""

    prefill_pairs: float
    """Sum over its prefills of n·(before + n/2), for n tokens computed after *before* others."""

    def timed(self) -> Iteration:
        """The part that all versions know."""
        return Iteration(
            compute_tokens=self.compute_tokens,
            context_tokens=self.context_tokens,
            num_decodes=self.num_decodes,
            duration_s=self.duration_s,
        )


class IterationsObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="iterations.observed.v1"
):
    """A sample of an engine's iterations."""

    instance_id: InstanceId
    model: ModelName
    engine: str
    device: str
    at: UnixTime
    iterations: tuple[Iteration, ...]
    prefill_pairs: tuple[int, ...] = ()
    """Of each iteration, as in `EngineIteration`; agents of older versions do not say."""


class RequestObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.observed.v1"
):
    """What one finished request teaches the estimator. No prompt, no text."""

    request_id: RequestId
    instance_id: InstanceId
    model: ModelName
    engine: str
    device: str
    application: str
    tenant: TenantId
    qos_class: QosClass
    prompt_tokens: int
    """As the engine's tokenizer counted them, or as estimated when none did."""
    output_tokens: int
    arrived_at: UnixTime
    pulled_at: UnixTime
    submitted_at: UnixTime
    first_token_at: UnixTime
    finished_at: UnixTime
    attained: bool
    outcome: str = "completed"
    """`completed`, or the error code it ended with; then times it never reached are 0."""
    evictions: int = 0
    crashes: int = 0
    cached_tokens: int = 0
    relegated: bool = False
    max_tbt_s: Seconds = 0.0
    prompt_text: PromptText | None = None
    """What `prompt_tokens` were counted in; none for token ids, and where none were counted."""
    finish_reason: FinishReason | None = None
    """Of a completed request; agents of older versions do not say."""
    max_tokens: int = 0
    """What the request allowed; 0 when the agent does not say."""
    ignore_eos: bool = False
    """Whether the model's wish to end counted for nothing."""
    grouped_at: UnixTime = 0.0
    """0 when the agent does not say."""
    foretold: WaitForecast | None = None
    """Of the time from `grouped_at` to `submitted_at`, if anything was."""


class ModelActivated(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.activated.v1"
):
    """A swap took place: how long it took and from where."""

    instance_id: InstanceId
    model: ModelName
    source: Residency
    duration_s: Seconds
    at: UnixTime
    path: ActivationPath | None = None


Telemetry = (
    InstanceStatus
    | LanesObserved
    | LeaderTick
    | IterationsObserved
    | RequestObserved
    | ModelActivated
)
