"""The agent's state in memory. Sync methods, no IO."""

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from shared.broker.protocol import Delivery
from shared.contracts.base import InstanceId, ModelName, RequestId, RunId, Seconds, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.lanes import work_version_of
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import FinishReason, QueuedRequest
from shared.contracts.telemetry import InstanceTotals
from solver.planning.lanes import is_bygone
from solver.scheduling.keys import Tier, tier_of
from solver.scheduling.pulling import PullOrder
from solver.scheduling.window import Window, tokens_needed

CANCELLED_MEMORY = 20_000
DEPARTED_MEMORY = 2_000


class Ending(Enum):
    """Why a run is being ended from outside."""

    EVICTED = "evicted"
    """Back to its resume queue, with progress."""
    STOPPED = "stopped"
    """The producer does not want this run; nothing is owed."""
    CANCELLED = "cancelled"
    """The producer gave the request up; an error final is owed."""
    SWAPPED_OUT = "swapped_out"
    """Off the engine, still in our hands, to be resumed here."""


@dataclass(slots=True, kw_only=True)
class Pulled:
    """A request in our hands, with every unacknowledged delivery of it."""

    request: QueuedRequest
    deliveries: list[Delivery]
    pulled_at: UnixTime
    leaving: bool = False
    """Its deliveries are being settled: a further copy is none of its own."""
    checkpointed: bool = False
    """An operator wants its KV kept in host memory, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """A request off the engine and still ours: its deliveries stay unacknowledged."""

    pulled: Pulled
    """With the progress that its run made here."""
    context_tokens: int
    """Whose KV it had."""
    lease_until: UnixTime
    """Then it becomes an eviction, unless it runs again."""
    resume_at: UnixTime
    """From then on it is in the window."""


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
    rest_s: Seconds = 0.0
    """If it is swapped out: how long it then rests at least."""
    kept: bool = False
    """It was swapped out: its request stays ours."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing of this run is left here."""

    @property
    def request(self) -> QueuedRequest:
        return self.pulled.request

    @property
    def engine_id(self) -> RequestId:
        """
        Its name on the engine: another one for each run.

        What the engine still has under way of an aborted run must not reach the next one.
        """
        return RequestId(f"{self.request.request_id}/{self.run_id}")

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
    swapped_out: int = 0
    relegated: int = 0
    swaps: int = 0
    crashes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    by_lane: dict[str, int] = field(default_factory=dict)
    pulled_to: dict[str, UnixTime] = field(default_factory=dict)
    """Enqueue time of the last request pulled from each lane."""

    def pull(self, queue: str, grouped_at: UnixTime) -> None:
        """One more request came from *queue*; lanes that are gone by now are forgotten."""
        self.pulled += 1
        version = work_version_of(queue)
        for lane in [lane for lane in self.by_lane if is_bygone(lane, version)]:
            del self.by_lane[lane], self.pulled_to[lane]
        self.by_lane[queue] = self.by_lane.get(queue, 0) + 1
        self.pulled_to[queue] = grouped_at

    def frozen(self) -> InstanceTotals:
        """As a message part."""
        return InstanceTotals(
            pulled=self.pulled,
            completed=self.completed,
            failed=self.failed,
            evicted=self.evicted,
            swapped_out=self.swapped_out,
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
    swapped_out: dict[RequestId, SwappedOut] = field(default_factory=dict)
    """What rests outside the window, or waits in it to be resumed."""
    departed: OrderedDict[RequestId, str] = field(default_factory=OrderedDict)
    """What became of those that left lately."""
    pulling: int = 0
    """Pulls under way."""
    cancelled: OrderedDict[tuple[RequestId, str | None], None] = field(default_factory=OrderedDict)
    """Given up, by id and reply queue."""
    plan: PlanPublished | None = None
    plan_at: UnixTime = 0.0
    model: ModelName | None = None
    """The active model; written by operations on models, and when the engine has died."""
    swaps: int = 0
    """Changes of the model under way, see `swap`."""
    draining: bool = False
    noticed: dict[str, UnixTime] = field(default_factory=dict)
    """Queues that notices told of, and when."""
    profiles: dict[ModelName, Profile] = field(default_factory=dict)
    pace_s: Seconds = math.inf
    """Mean time of the iterations that the engine last told of."""
    totals: Totals = field(default_factory=Totals)
    aborts: set[asyncio.Future[None]] = field(default_factory=set)
    """Aborts under way, held so that they are not collected."""
    pull_wake: asyncio.Event = field(default_factory=asyncio.Event)
    admit_wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def profile(self) -> Profile | None:
        """Of the active model on this engine."""
        return None if self.model is None else self.profiles.get(self.model)

    @property
    def swapping(self) -> bool:
        """The model is about to change, and nothing is admitted."""
        return self.swaps > 0

    @contextmanager
    def swap(self) -> Iterator[None]:
        """The model is about to change while the context is open; several may be."""
        self.swaps += 1
        try:
            yield
        finally:
            self.swaps -= 1
            self.wake()

    def wake(self) -> None:
        """Something changed that pulling or admission may depend on."""
        self.pull_wake.set()
        self.admit_wake.set()

    def hold(self, pulled: Pulled) -> None:
        """Put a request into the window."""
        self.pulled[pulled.request.request_id] = pulled
        self.window.add(pulled.request)
        self.admit_wake.set()

    def only_waits(self, pulled: Pulled) -> bool:
        """Whether it is in the window, and has not run here."""
        request_id = pulled.request.request_id
        return self.pulled.get(request_id) is pulled and request_id not in self.swapped_out

    def release(self, request_id: RequestId) -> Pulled | None:
        """Take a request that does not run out of here: from the window, or from its rest."""
        self.window.remove(request_id)
        swapped = self.swapped_out.pop(request_id, None)
        pulled = self.pulled.pop(request_id, None)
        return swapped.pulled if pulled is None and swapped is not None else pulled

    def swap_out(self, swapped: SwappedOut) -> None:
        """A run has left the engine, and its request stays."""
        self.swapped_out[swapped.pulled.request.request_id] = swapped

    def unrest(self, request_id: RequestId) -> None:
        """A swapped-out request has rested: back into the window."""
        if request_id not in self.pulled:
            self.hold(self.swapped_out[request_id].pulled)

    def find(self, request_id: RequestId) -> Pulled | None:
        """The request wherever it is here, unless it is on its way out."""
        run = self.runs.get(request_id)
        if run is not None and not run.pulled.leaving:
            return run.pulled
        swapped = self.swapped_out.get(request_id)
        return swapped.pulled if swapped is not None else self.pulled.get(request_id)

    def depart(self, request_id: RequestId, how: str) -> None:
        """Remember what became of a request, for operators who ask about it later."""
        self.departed.pop(request_id, None)
        self.departed[request_id] = how
        while len(self.departed) > DEPARTED_MEMORY:
            self.departed.popitem(last=False)

    def cancel(self, request_id: RequestId, reply_to: str | None) -> None:
        """Remember that a request was given up, for when it is pulled."""
        self.cancelled[request_id, reply_to] = None
        while len(self.cancelled) > CANCELLED_MEMORY:
            self.cancelled.popitem(last=False)

    @property
    def num_waiting(self) -> int:
        """Requests in our hands that do not run."""
        return len(self.pulled.keys() | self.swapped_out.keys())

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
