"""The control state of one serving instance."""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from shared.contracts.base import InstanceId, ModelName, RequestId, RunId, Seconds, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.lanes import LaneLayout, inbox_name
from shared.contracts.plans import PlanPublished, Segment
from shared.contracts.requests import MAX_HISTORY, HistoryEntry, QueuedRequest
from shared.contracts.telemetry import Capability, InstanceTotals
from solver.instance.admission.holding import Holding
from solver.instance.admission.urgent import Urgent
from solver.instance.events import EngineView, ModelFacts
from solver.instance.renewal.renewals import Renewals
from solver.instance.request import Held
from solver.instance.requests import Requests
from solver.instance.room import Room
from solver.instance.scripts import Scripts, Tracks
from solver.planning.added_operations import AddedOperation
from solver.planning.lso.results import LsoResult
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds
from solver.scheduling.pulling import PullOrder
from solver.scheduling.window import Window

_CANCELLED_MEMORY = 150_000
"""
Maximum number of stored cancellations; the oldest are forgotten first. The broker keeps fewer for
instances that start.
"""
_DEPARTED_MEMORY = 2_000
"""Maximum number of stored outcomes of requests that have left."""
_ANSWERS_MEMORY = 1_000
"""Maximum number of stored results of orders."""
MOST_POLL_S = 5.0
"""Longest time without a poll of a queue; a poll finds requests whose notice was lost."""
NO_LIMIT = 2**31 - 1
"""Value that turns a limit off: an engine applies the lower of its own limit and this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """Constants of an instance."""

    instance_id: InstanceId
    incarnation: str
    """Unique id of the process; the ids of runs are made from it."""
    run_secret: str = ""
    """Key that makes the ids of runs unguessable; without it, they are numbers."""
    engine: str
    device: str
    capabilities: frozenset[Capability]
    layout: LaneLayout
    """Queue layout, for the deadlines of lanes."""
    bounds: PullBounds = DEFAULT_BOUNDS
    best_effort_running_share: float = 0.75
    poll_s: Seconds = 1.0
    pulls: int = 3
    """Number of concurrent pulls."""
    evict_hold_s: Seconds = 2.0
    aging_bound_s: Seconds = 600.0
    swap_lease_s: Seconds = 30.0
    transfer_bytes_per_s: float = float(4 << 30)
    drain_limit_s: Seconds = 10.0
    consumer_timeout_s: Seconds = 1800.0
    """Time after which the broker takes back a delivery that is not acknowledged."""
    patience_s: Seconds = 10.0
    """Time without a plan and without work after which the instance looks for work itself."""


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    pulled: int = 0
    completed: int = 0
    failed: int = 0
    evicted: int = 0
    swapped_out: int = 0
    renewed: int = 0
    """Number of copies that have replaced the deliveries of held requests."""
    connections_lost: int = 0
    relegated: int = 0
    expired: Counter[str] = field(default_factory=Counter)
    """Place -> number of requests that reached their ends there: `pull`, `window` or `run`."""
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
        """The counters in the form of a status."""
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


MOST_PAUSE_S = 60.0
"""Longest pause between two attempts to activate a model."""


@dataclass(slots=True, kw_only=True)
class ActivationRetries:
    """
    Backoff after failed activations of one model; each failure doubles the pause.

    Every attempt ends the runs of the active model, so frequent attempts would stop all service.
    """

    first_pause_s: Seconds
    _model: ModelName | None = None
    _pause_s: Seconds = 0.0
    next_at: UnixTime = -math.inf
    """Time of the next attempt after a failure."""

    def failed(self, model: ModelName, now: UnixTime) -> Seconds:
        """Record a failed activation of *model*; return the pause before the next attempt."""
        again = model == self._model
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s) if again else self.first_pause_s
        self._model, self.next_at = model, now + self._pause_s
        return self._pause_s

    def succeeded(self, model: ModelName) -> None:
        """Record that *model* is active, and reset the count of its failed activations."""
        if model == self._model:
            self._model = None

    def rests(self, model: ModelName, now: UnixTime) -> bool:
        """Return whether *model* must still wait after a failed activation."""
        return model == self._model and now < self.next_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """The activation of the active model, from its order to its end."""

    begun_at: UnixTime
    ended_at: UnixTime


@dataclass(slots=True)
class Following:
    """What the instance does about its plan, or without a plan."""

    plan: PlanPublished | None = None
    plan_at: UnixTime = 0.0
    busy_at: UnixTime = 0.0
    """Time of the last work or new model."""
    ordered: ModelName | None = None
    """Model that an operator ordered; it stays active until a later plan arrives."""
    lost: ModelName | None = None
    """Model of a dead engine that could not be activated again; None once a model is active."""
    applied: tuple[Segment, ...] = ()
    """Virtual queue that was last applied to the instance."""
    swapping: int = 0
    """Number of changes of the model in progress; no request is admitted meanwhile."""
    activating: ModelName | None = None
    activated: Activated | None = None
    started: bool = False
    """True once the first model is active, if the settings name one."""
    busy: bool = False
    """True while a script follows the plan."""
    retries: ActivationRetries = field(default_factory=lambda: ActivationRetries(first_pause_s=1.0))
    paused_until: UnixTime = -math.inf
    waiting: dict[str, UnixTime] = field(default_factory=dict)
    """Queue of another model with work at each count -> time of the first of these counts."""
    count_at: UnixTime = 0.0
    counting: bool = False
    claiming: ModelName | None = None


@dataclass(slots=True)
class Work:
    """Which parts of the instance an event may have changed."""

    admit: bool = True
    pull: bool = True
    follow: bool = True

    def all(self) -> None:
        """Mark all parts."""
        self.admit = self.pull = self.follow = True

    def serve(self) -> None:
        """Mark admission and pulls: there may be room for one more request."""
        self.admit = self.pull = True


class InstanceState:
    """
    Requests, operations and the active model of one instance.

    Args:
        settings: Constants.
        models: Models that the instance may serve.
        now: Unix seconds.
        operations: Operations that packages add, by name.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        models: Mapping[ModelName, ModelFacts],
        now: UnixTime,
        operations: Mapping[str, AddedOperation] | None = None,
    ) -> None:
        self.settings = settings
        self.operations = dict(operations or {})
        self.models = dict(models)
        self.inbox = inbox_name(settings.instance_id)
        """Queue that only this instance reads."""
        self.removed: dict[ModelName, UnixTime] = {}
        """Model that is about to be released -> time of its removal from the registry."""
        self.now = now
        self.engine = EngineView()
        self.room = Room(settings.bounds)
        self.requests = Requests(Window(aging_bound_s=settings.aging_bound_s), self.room)
        self.order = PullOrder(poll_s=settings.poll_s, most_poll_s=MOST_POLL_S)
        self.pulls: Counter[str] = Counter()
        """Queue -> number of pulls in progress."""
        self.num_pulls = 0
        self.model: ModelName | None = None
        self.draining = False
        self.stopping = False
        """True once the instance is about to end, so that it pulls nothing at all."""
        self.profiles: dict[ModelName, Profile] = {}
        self.noticed: dict[str, UnixTime] = {}
        """Queue that a notice named -> time of its last notice."""
        self.cancelled: OrderedDict[tuple[RequestId, str], None] = OrderedDict()
        self.departed: OrderedDict[RequestId, str] = OrderedDict()
        """Request that left recently -> its outcome."""
        self.urgent = Urgent()
        self.holding = Holding()
        self.renewals = Renewals(timeout_s=settings.consumer_timeout_s)
        self.totals = Totals()
        self.following = Following(plan_at=0.0, busy_at=now)
        self.scripts = Scripts()
        self.tracks = Tracks()
        self.work = Work()
        self.wake_at: UnixTime = math.inf
        """Time of the last `WakeAt`."""
        self.late_at: UnixTime = -math.inf
        """Time before which runs that wait in the engine are not evicted as late."""
        self.pull_at: UnixTime = -math.inf
        """Time before which the broker is not asked."""
        self.limits = (NO_LIMIT, NO_LIMIT)
        """Token budget and running requests that an operator has set."""
        self.answers: OrderedDict[str, LsoResult | None] = OrderedDict()
        """Order -> its result; None while it is executed."""
        self.purposes: set[str] = set()
        """Purposes for which operations are executed, each at most once at a time."""
        self._next_number = 0

    @property
    def profile(self) -> Profile | None:
        """Profile of the active model on this engine."""
        return None if self.model is None else self.profiles.get(self.model)

    @property
    def orders_prefills(self) -> bool:
        """
        True if the instance orders prefills by deadlines, because the engine does not.
        """
        return Capability.SCHEDULING not in self.settings.capabilities

    @property
    def most_pulls(self) -> int:
        """
        Number of concurrent pulls. An instance that takes turns with others asks once: a pull in
        progress counts as a request, and others pull meanwhile.
        """
        return 1 if self.orders_prefills else self.settings.pulls

    @property
    def may_pull(self) -> bool:
        """True if the instance may pull requests, regardless of its room."""
        return not (self.draining or self.following.swapping or self.model is None)

    def uses(self, queue: str) -> bool:
        """Return whether a pull from *queue* is in progress, or a request from it is unsettled."""
        return self.pulls[queue] > 0 or self.requests.uses(queue)

    def lose_engine(self) -> None:
        """Record that the engine is dead, so that no request is submitted to it."""
        self.engine = msgspec.structs.replace(self.engine, alive=False, model=None)
        self.work.follow = True

    def serve(self, model: ModelName | None) -> None:
        """Set the active model; requests are predicted with its profile from now on."""
        self.model = model
        if model is not None:
            self.following.lost = None
        self.predict()

    def predict(self) -> None:
        """Count all requests with the present profile."""
        self.room.set_profile(self.profile, tuple(self.requests))

    def number(self) -> int:
        """A number that was not used before."""
        self._next_number += 1
        return self._next_number

    def run_id(self) -> RunId:
        """
        Id of a new run, unique in the mesh. Only the request's reply queue receives it, and it
        cannot be guessed from the ids of other runs, since any producer may stop a run by its id.
        """
        name = f"{self.settings.incarnation}{self.number():x}"
        if not self.settings.run_secret:
            return RunId(name)
        key = self.settings.run_secret.encode()
        return RunId(blake2b(name.encode(), key=key, digest_size=10).hexdigest())

    def remember(self, order: str, result: LsoResult) -> None:
        """Store the result of an order, which may be repeated."""
        self.answers[order] = result
        while len(self.answers) > _ANSWERS_MEMORY:
            self.answers.popitem(last=False)

    def cancel(self, request_id: RequestId, proof: str) -> None:
        """
        Store that a request was cancelled, so that it ends if it is pulled later.

        Args:
            request_id: Id of the request.
            proof: Proof of the sender, by `cancel_proof` or `stored_proof`.
        """
        self.cancelled[request_id, proof] = None
        while len(self.cancelled) > _CANCELLED_MEMORY:
            self.cancelled.popitem(last=False)

    def is_cancelled(self, held: Held) -> bool:
        """Return whether the producer has cancelled the request."""
        return any(
            (held.request_id, proof) in self.cancelled for proof in cancel_proofs(held.request)
        )

    def note(self, held: Held, what: str, why: str = "") -> None:
        """Add an entry to the history that travels with a request."""
        run = held.run
        self._append(
            held,
            HistoryEntry(
                at=self.now,
                instance_id=self.settings.instance_id,
                what=what,
                why=why,
                pulled_at=held.pulled_at,
                begun_at=None if run is None else run.submitted_at,
            ),
        )

    def note_activation(self, held: Held) -> None:
        """Add the activation of the active model, if *held* has waited for it in a queue."""
        history, activated = held.request.history, self.following.activated
        since = history[-1].at if history else held.request.grouped_at
        if activated is None or activated.ended_at <= since:
            return
        entry = HistoryEntry(
            at=activated.ended_at,
            instance_id=self.settings.instance_id,
            what="activated",
            begun_at=activated.begun_at,
        )
        self._append(held, entry)

    def _append(self, held: Held, entry: HistoryEntry) -> None:
        before = held.request.history
        if len(before) >= MAX_HISTORY:
            before = (before[0], *before[2:])
        held.request = msgspec.structs.replace(held.request, history=(*before, entry))

    def depart(self, request_id: RequestId, how: str) -> None:
        """Store the outcome of a request, for later orders of operators."""
        self.departed.pop(request_id, None)
        self.departed[request_id] = how
        while len(self.departed) > _DEPARTED_MEMORY:
            self.departed.popitem(last=False)


def cancel_proofs(request: QueuedRequest) -> tuple[str, ...]:
    """Proofs of which any one entitles a sender to cancel *request*."""
    proof = cancel_proof(request.reply_to, request.tenant)
    return (proof,) if request.stored is None else (proof, stored_proof(request.tenant))


def stored_proof(tenant: str) -> str:
    """Proof of a gateway or planner, which has authenticated the tenant of a stored request."""
    return f"stored {tenant}"


def cancel_proof(reply_to: str | None, user: str | None) -> str:
    """
    Proof that entitles the sender of a cancellation, so that no tenant cancels another's request:
    the name of the reply queue, which is secret; for a request without one, its tenant, as the
    broker has authenticated it. Ids prove nothing, since producers choose them.
    """
    return f"reply {reply_to}" if reply_to is not None else f"user {user}"
