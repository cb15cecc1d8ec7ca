"""The agent's state in memory. Sync methods, no IO."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from shared.broker.protocol import Delivery
from shared.contracts.base import InstanceId, ModelName, RequestId, RunId, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import FinishReason, QueuedRequest
from shared.contracts.telemetry import InstanceTotals
from solver.scheduling.keys import Tier, tier_of
from solver.scheduling.pulling import PullOrder
from solver.scheduling.window import Window, tokens_needed

CANCELLED_MEMORY = 20_000


class Ending(Enum):
    """Why a run is being ended from outside."""

    EVICTED = "evicted"
    """Back to its resume queue, with progress."""
    STOPPED = "stopped"
    """The producer does not want this run; nothing is owed."""
    CANCELLED = "cancelled"
    """The producer gave the request up; an error final is owed."""


@dataclass(slots=True, kw_only=True)
class Pulled:
    """A request in our hands, with every unacknowledged delivery of it."""

    request: QueuedRequest
    deliveries: list[Delivery]
    pulled_at: UnixTime
    leaving: bool = False
    """Its deliveries are being settled: a further copy is none of its own."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One execution of a request on the engine."""

    pulled: Pulled
    run_id: RunId = field(default_factory=lambda: RunId(secrets.token_hex(8)))
    submitted_at: UnixTime = 0.0
    token_ids: list[int] = field(default_factory=list)
    """Including those of earlier runs."""
    text: str = ""
    first_token_at: UnixTime | None = None
    last_token_at: UnixTime | None = None
    late_tokens: int = 0
    max_tbt_s: float = 0.0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    ending: Ending | None = None
    on_begin: Callable[[], None] | None = None
    """Called at this run's first tokens."""

    @property
    def request(self) -> QueuedRequest:
        return self.pulled.request

    @property
    def begun(self) -> bool:
        """Whether this run has given a token: it waits for the engine no longer."""
        return len(self.token_ids) > len(self.request.progress.token_ids)

    def on_tokens(self, token_ids: tuple[int, ...], now: UnixTime) -> None:
        """Account for new tokens against their deadlines (QoServe eq. 2)."""
        slo, arrived_at = self.request.slo, self.request.arrived_at
        begins = not self.begun and bool(token_ids)
        if self.last_token_at is not None:
            self.max_tbt_s = max(self.max_tbt_s, now - self.last_token_at)
        if self.first_token_at is None:
            self.first_token_at = now
        for token in token_ids:
            self.token_ids.append(token)
            self.late_tokens += now > slo.token_deadline_at(arrived_at, len(self.token_ids))
        self.last_token_at = now
        if begins and self.on_begin is not None:
            self.on_begin()


@dataclass(slots=True)
class Totals:
    """Counters since start."""

    pulled: int = 0
    completed: int = 0
    failed: int = 0
    evicted: int = 0
    relegated: int = 0
    swaps: int = 0
    crashes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    by_lane: dict[str, int] = field(default_factory=dict)
    pulled_to: dict[str, UnixTime] = field(default_factory=dict)
    """Enqueue time of the last request pulled from each lane."""

    def frozen(self) -> InstanceTotals:
        """As a message part."""
        return InstanceTotals(
            pulled=self.pulled,
            completed=self.completed,
            failed=self.failed,
            evicted=self.evicted,
            relegated=self.relegated,
            swaps=self.swaps,
            crashes=self.crashes,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(slots=True, kw_only=True)
class AgentState:
    """Everything one agent knows."""

    instance_id: InstanceId
    window: Window
    order: PullOrder
    incarnation: str = field(default_factory=lambda: secrets.token_hex(6))
    pulled: dict[RequestId, Pulled] = field(default_factory=dict)
    """What the window holds."""
    runs: dict[RequestId, Run] = field(default_factory=dict)
    pulling: int = 0
    """Pulls under way."""
    cancelled: OrderedDict[tuple[RequestId, str | None], None] = field(default_factory=OrderedDict)
    """Given up, by id and reply queue."""
    plan: PlanPublished | None = None
    plan_at: UnixTime = 0.0
    model: ModelName | None = None
    """The active model; written by residency only."""
    swapping: bool = False
    draining: bool = False
    noticed: dict[str, UnixTime] = field(default_factory=dict)
    """Queues that notices told of, and when."""
    profiles: dict[ModelName, Profile] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    aborts: set[asyncio.Future[None]] = field(default_factory=set)
    """Aborts under way, held so that they are not collected."""
    pull_wake: asyncio.Event = field(default_factory=asyncio.Event)
    admit_wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def profile(self) -> Profile | None:
        """Of the active model on this engine."""
        return None if self.model is None else self.profiles.get(self.model)

    def wake(self) -> None:
        """Something changed that pulling or admission may depend on."""
        self.pull_wake.set()
        self.admit_wake.set()

    def hold(self, pulled: Pulled) -> None:
        """Put a request into the window."""
        self.pulled[pulled.request.request_id] = pulled
        self.window.add(pulled.request)
        self.admit_wake.set()

    def release(self, request_id: RequestId) -> Pulled | None:
        """Take a request out of the window."""
        self.window.remove(request_id)
        return self.pulled.pop(request_id, None)

    def find(self, request_id: RequestId) -> Pulled | None:
        """The request wherever it is here, unless it is on its way out."""
        run = self.runs.get(request_id)
        found = run.pulled if run is not None else None
        return found if found and not found.leaving else self.pulled.get(request_id)

    def cancel(self, request_id: RequestId, reply_to: str | None) -> None:
        """Remember that a request was given up, for when it is pulled."""
        self.cancelled[request_id, reply_to] = None
        while len(self.cancelled) > CANCELLED_MEMORY:
            self.cancelled.popitem(last=False)

    def running_count(self, tier: Tier) -> int:
        """Runs of one tier."""
        return sum(tier_of(run.request) is tier for run in self.runs.values())

    def not_begun(self) -> list[QueuedRequest]:
        """Requests that were pulled and wait, in the window or in the engine."""
        submitted = [run.request for run in self.runs.values() if not run.begun]
        return [*self.window, *submitted]

    @property
    def running_tokens(self) -> int:
        """KV tokens that the runs may need at their end."""
        return sum(tokens_needed(run.request) for run in self.runs.values())
