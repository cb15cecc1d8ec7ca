"""The agent's state in memory; all methods are synchronous and do no IO."""

import asyncio
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from services.agent.answer import AnswerStream
from services.agent.call_answer import CallAnswer
from shared.broker.protocol import Delivery
from shared.contracts.base import InstanceId, ModelName, RequestId, RunId, Seconds, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import InstanceTotals
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import rank_of
from solver.scheduling.pulling import PullOrder
from solver.scheduling.window import Window, tokens_needed

CANCELLED_MEMORY = 20_000
DEPARTED_MEMORY = 2_000


class Ending(Enum):
    """Reason for which the agent ends a run early."""

    EVICTED = "evicted"
    """The request returns to its resume queue with its progress."""
    STOPPED = "stopped"
    """The producer no longer needs this run, so no final reply is sent."""
    CANCELLED = "cancelled"
    """The producer cancelled the request, so the final reply is an error."""
    SWAPPED_OUT = "swapped_out"
    """The run leaves the engine, and the agent keeps the request to resume it here."""


@dataclass(slots=True, kw_only=True)
class Pulled:
    """A request held by the agent, with all of its unacknowledged deliveries."""

    request: QueuedRequest
    deliveries: list[Delivery]
    pulled_at: UnixTime
    leaving: bool = False
    """
    True while the request's deliveries are being settled; another copy is then not merged into it.
    """
    checkpointed: bool = False
    """True if an operator requested that the KV of this request be kept in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """A request that was removed from the engine and is kept with its deliveries unacknowledged."""

    pulled: Pulled
    """The swapped-out request with the progress of its run on this instance."""
    context_tokens: int
    """Number of tokens whose KV was on the engine when the request was swapped out."""
    lease_until: UnixTime
    """Time at which the swapped-out request is evicted if it has not run again."""
    resume_at: UnixTime
    """Time at which the swapped-out request returns to the window."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One execution of a request on the engine."""

    pulled: Pulled
    run_id: RunId = field(default_factory=lambda: RunId(secrets.token_hex(8)))
    submitted_at: UnixTime = 0.0
    ending: Ending | None = None
    on_begin: Callable[[], None] | None = None
    """Called at this run's first tokens."""
    rest_s: Seconds = 0.0
    """Minimum time outside the window after the request of this run is swapped out."""
    kept: bool = False
    """True if the agent keeps the request, because its run was swapped out."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run has ended and its outcome on this instance is complete."""
    answer: AnswerStream | CallAnswer = field(init=False)

    def __post_init__(self) -> None:
        request = self.pulled.request
        self.answer = AnswerStream(request) if request.call is None else CallAnswer(request)

    @property
    def request(self) -> QueuedRequest:
        return self.pulled.request

    @property
    def engine_id(self) -> RequestId:
        """
        Id of this run on the engine; different for each run.

        Late outputs of an aborted run must not reach the next run of the same request.
        """
        return RequestId(f"{self.request.request_id}/{self.run_id}")

    @property
    def tokens_needed(self) -> int:
        """Number of KV tokens that this run is expected to need at its end."""
        return tokens_needed(self.request, generated=self.answer.num_tokens)


@dataclass(slots=True)
class Totals:
    """Counters of the agent since its start."""

    pulled: int = 0
    completed: int = 0
    failed: int = 0
    evicted: int = 0
    swapped_out: int = 0
    connections_lost: int = 0
    relegated: int = 0
    swaps: int = 0
    crashes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    by_lane: dict[str, int] = field(default_factory=dict)
    pulled_to: dict[str, UnixTime] = field(default_factory=dict)
    """Lane -> enqueue time of the last request pulled from the lane."""

    def pull(self, queue: str, grouped_at: UnixTime) -> None:
        """Count a request pulled from *queue*."""
        self.pulled += 1
        self.by_lane[queue] = self.by_lane.get(queue, 0) + 1
        self.pulled_to[queue] = grouped_at

    def frozen(self) -> InstanceTotals:
        """Convert the counters to the form that the status message needs."""
        return InstanceTotals(
            pulled=self.pulled,
            completed=self.completed,
            failed=self.failed,
            evicted=self.evicted,
            swapped_out=self.swapped_out,
            connections_lost=self.connections_lost,
            relegated=self.relegated,
            swaps=self.swaps,
            crashes=self.crashes,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(slots=True, kw_only=True)
class AgentState:
    """State of one agent."""

    instance_id: InstanceId
    window: Window
    order: PullOrder
    incarnation: str = field(default_factory=lambda: secrets.token_hex(6))
    pulled: dict[RequestId, Pulled] = field(default_factory=dict)
    """Requests in the window by request id."""
    runs: dict[RequestId, Run] = field(default_factory=dict)
    swapped_out: dict[RequestId, SwappedOut] = field(default_factory=dict)
    """Swapped-out requests by request id, both in their rest period and in the window."""
    departed: OrderedDict[RequestId, str] = field(default_factory=OrderedDict)
    """Id of a request that left the instance recently -> outcome of the request."""
    pulls: Counter[str] = field(default_factory=Counter)
    """Queue -> number of pulls in progress."""
    cancelled: OrderedDict[tuple[RequestId, str | None], None] = field(default_factory=OrderedDict)
    """Cancelled requests, identified by request id and reply queue."""
    plan: PlanPublished | None = None
    plan_at: UnixTime = 0.0
    model: ModelName | None = None
    """
    The active model. Operations on models write this field, and so does the restart of a dead
    engine.
    """
    swaps: int = 0
    """Number of model changes in progress; the context `swap` counts them."""
    activating: ModelName | None = None
    """Model that is being activated; only `swap` writes it."""
    draining: bool = False
    differing: frozenset[ModelName] = frozenset()
    """
    Models whose files differ from the gateways', so that this instance does not serve them; only
    `GatewayFiles` writes it.
    """
    noticed: dict[str, UnixTime] = field(default_factory=dict)
    """Queue that a notice named -> time of its last notice."""
    profiles: dict[ModelName, Profile] = field(default_factory=dict)
    pace_s: Seconds = math.inf
    """Mean duration of the iterations that the engine reported last."""
    totals: Totals = field(default_factory=Totals)
    aborts: set[asyncio.Future[None]] = field(default_factory=set)
    """Tasks of aborts in progress, referenced here so that they are not garbage-collected."""
    pull_wake: asyncio.Event = field(default_factory=asyncio.Event)
    admit_wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def profile(self) -> Profile | None:
        """Profile of the active model on this engine."""
        return None if self.model is None else self.profiles.get(self.model)

    @property
    def swapping(self) -> bool:
        """True while the active model changes; no request is admitted then."""
        return self.swaps > 0

    @contextmanager
    def swap(self, model: ModelName | None = None) -> Iterator[None]:
        """Context of a model change, to *model* if it is known; may be nested."""
        self.swaps += 1
        before, self.activating = self.activating, model or self.activating
        try:
            yield
        finally:
            self.swaps -= 1
            self.activating = before
            self.wake()

    def wake(self) -> None:
        """Wake the loops that pull and admit, after a change that may affect them."""
        self.pull_wake.set()
        self.admit_wake.set()

    def hold(self, pulled: Pulled) -> None:
        """Add a pulled request to the window."""
        self.pulled[pulled.request.request_id] = pulled
        self.window.add(pulled.request)
        self.admit_wake.set()

    def only_waits(self, pulled: Pulled) -> bool:
        """Return whether *pulled* is in the window and has not run on this instance."""
        request_id = pulled.request.request_id
        return self.pulled.get(request_id) is pulled and request_id not in self.swapped_out

    def release(self, request_id: RequestId) -> Pulled | None:
        """Remove a request that does not run from the window or from the swapped-out requests."""
        self.window.remove(request_id)
        swapped = self.swapped_out.pop(request_id, None)
        pulled = self.pulled.pop(request_id, None)
        return swapped.pulled if pulled is None and swapped is not None else pulled

    def swap_out(self, swapped: SwappedOut) -> None:
        """Record that a run has left the engine and that the agent keeps its request."""
        self.swapped_out[swapped.pulled.request.request_id] = swapped

    def unrest(self, request_id: RequestId) -> None:
        """Return a swapped-out request to the window after its rest period."""
        if request_id not in self.pulled:
            self.hold(self.swapped_out[request_id].pulled)

    def find(self, request_id: RequestId) -> Pulled | None:
        """Return the held request with the given id, unless its deliveries are being settled."""
        run = self.runs.get(request_id)
        if run is not None and not run.pulled.leaving:
            return run.pulled
        swapped = self.swapped_out.get(request_id)
        return swapped.pulled if swapped is not None else self.pulled.get(request_id)

    def depart(self, request_id: RequestId, how: str) -> None:
        """Store the outcome of a request for later commands of operators."""
        self.departed.pop(request_id, None)
        self.departed[request_id] = how
        while len(self.departed) > DEPARTED_MEMORY:
            self.departed.popitem(last=False)

    def cancel(self, request_id: RequestId, reply_to: str | None) -> None:
        """Store that a request was cancelled, so that the request ends if it is pulled later."""
        self.cancelled[request_id, reply_to] = None
        while len(self.cancelled) > CANCELLED_MEMORY:
            self.cancelled.popitem(last=False)

    @property
    def pulling(self) -> int:
        """Number of pulls in progress."""
        return self.pulls.total()

    def uses(self, queue: str) -> bool:
        """Return whether this agent holds or is pulling a request from *queue*."""
        held = (
            *self.pulled.values(),
            *(run.pulled for run in self.runs.values()),
            *(swapped.pulled for swapped in self.swapped_out.values()),
        )
        return self.pulls[queue] > 0 or any(
            delivery.queue == queue for pulled in held for delivery in pulled.deliveries
        )

    @property
    def num_waiting(self) -> int:
        """Number of held requests that do not run."""
        return len(self.pulled.keys() | self.swapped_out.keys())

    def running_count(self, rank: Rank) -> int:
        """Number of current runs whose requests have the given rank."""
        return sum(rank_of(run.request) is rank for run in self.runs.values())

    def not_begun(self) -> list[QueuedRequest]:
        """Held requests that wait in the window or in the engine."""
        submitted = [run.request for run in self.runs.values() if not run.answer.begun]
        return [*self.window, *submitted]

    @property
    def running_tokens(self) -> int:
        """Number of KV tokens that all current runs together are expected to need."""
        return sum(run.tokens_needed for run in self.runs.values())
