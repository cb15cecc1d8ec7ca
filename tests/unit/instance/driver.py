"""An instance with a broker, an engine and a clock that a test controls; nothing waits for time."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from shared.contracts.base import InstanceId, ModelName, RequestId, RunId
from shared.contracts.control import LsoCommand
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.plans import LaneQuota, PlanPublished, Segment, VirtualQueue
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import Capability, InstanceStatus, ModelState, Residency
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance import operations, views
from solver.instance.instance import Instance
from solver.instance.request import Held
from solver.instance.state import InstanceSettings
from solver.planning.added_operations import AddedOperation
from solver.planning.lso.operations import Lso
from solver.planning.lso.results import LsoResult
from solver.scheduling.pulling import deference_s
from tests.clocks import NOW
from tests.queued import LAYOUT, MODEL, OTHER

C = TypeVar("C", bound=do.Command)
OURS, R = InstanceId("i1"), RequestId("r")
_MOST_WAKES_PER_S = 50


def segment(*lanes: str, model: ModelName = MODEL) -> Segment:
    """A segment of a virtual queue."""
    return Segment(model=model, lanes=tuple(LaneQuota(lane=lane, quota=1) for lane in lanes))


def a_profile(constant_s: float = 0.01, linear_s: float = 0.0, **fields: Any) -> Profile:
    """A profile of `MODEL` with iterations of *constant_s*, and *linear_s* for each token."""
    latency = LatencyCoefficients(constant_s=constant_s, linear_s=linear_s)
    about: dict[str, Any] = {"engine": "scripted", "device": "paper", "version": 1, "at": 0.0}
    return Profile(model=MODEL, **about, **({"latency": latency} | fields))


class Driver:
    """
    Executes the commands of an instance at once, except the ends of runs.

    Pulls take what `put` has queued, departures are confirmed, and calls of the engine succeed,
    unless the test has set them to wait or to fail.

    Args:
        requests: Requests that wait in their lanes at the start.
        model: The model that is active at the start; None: none is active.
        engine: Fields of `EngineView`.
        operations: Operations of packages.
        settings: Fields of `InstanceSettings`; by default, the engine can do everything.
    """

    def __init__(
        self,
        *requests: QueuedRequest,
        model: ModelName | None = MODEL,
        engine: dict[str, Any] | None = None,
        operations: Mapping[str, AddedOperation] | None = None,
        **settings: Any,
    ) -> None:
        constants: dict[str, Any] = {
            "instance_id": OURS,
            "incarnation": "inc-",
            "engine": "scripted",
            "device": "paper",
            "capabilities": frozenset(Capability),
            "layout": LAYOUT,
        }
        models = {
            name: ev.ModelFacts(model=name, weight_bytes=size, kv_bytes_per_token=16)
            for name, size in ((MODEL, 1000), (OTHER, 2000))
        }
        self.now = NOW
        self.instance = Instance(
            InstanceSettings(**(constants | settings)), models, self.now, operations
        )
        self.engine: dict[str, Any] = {
            "alive": True,
            "max_running": 8,
            "kv_capacity_tokens": 10_000,
            "warm_capacity_bytes": 2500,
            "host_kv_capacity_bytes": 1 << 30,
        } | (engine or {})
        self.active: ModelName | None = None
        self.warm: set[ModelName] = set()
        self.queues: dict[str, deque[QueuedRequest | do.Renew]] = defaultdict(deque)
        """Ready requests and copies of renewed ones by queue."""
        self.absent: set[str] = set()
        """Queues that cannot be pulled from."""
        self.connected = True
        self.granted = True
        """True if claims are granted."""
        self.all: list[do.Command] = []
        """All commands so far."""
        self.runs: dict[RequestId, do.Submit] = {}
        self.lengths: dict[RunId, int] = {}
        """Present runs by request."""
        self.departed: dict[RequestId, do.Depart] = {}
        """Last departure of each request."""
        self.waiting: set[type[do.Command]] = set()
        """Kinds of commands that are not executed until `release`."""
        self.failing: dict[type[do.Call], list[str]] = defaultdict(list)
        """Kind of call -> messages of its next failures."""
        self.harmless = False
        """True if failures of calls change nothing."""
        self._times: list[float] = []
        self._connection = 0
        self._events: deque[ev.Event] = deque()
        self._is_handling = False
        self._open: list[do.Command] = []
        self._wake_at = math.inf
        self._deliveries = 0
        self._epoch = 0
        for request in requests:
            self.queues[request.lane].append(request)
        self.notice(*(request.lane for request in requests))
        self.look()
        self.give(ev.Started(initial=model))

    def give(self, *events: ev.Event) -> None:
        """Handle *events*, and execute the commands."""
        self._events.extend(events)
        if self._is_handling:
            return
        self._is_handling = True
        while self._events:
            for command in self.instance.handle(self._events.popleft(), self.now):
                self.all.append(command)
                self._times.append(self.now - NOW)
                if type(command) in self.waiting:
                    self._open.append(command)
                else:
                    self._execute(command)
        self._is_handling = False

    def look(self, **changes: Any) -> None:
        """Report the engine's state, with *changes* from now on."""
        self.engine |= changes
        self.give(ev.Loaded(engine=self._view()))

    def notice(self, *queues: str) -> None:
        """Report that requests were put into *queues*."""
        self.give(*(ev.Noticed(queue=queue) for queue in queues))

    def put(self, *requests: QueuedRequest, queue: str | None = None) -> None:
        """
        Queue requests in their lanes, or in *queue*, with a notice each, and let the time pass for
        which the instance leaves them to others.
        """
        for request in requests:
            self.queues[queue or request.lane].append(request)
            self.notice(queue or request.lane)
            if self._wake_at <= self.now + deference_s(0.0, taken=1.0):
                self.wait(self._wake_at - self.now)

    def plan(self, *segments: ModelName | Segment, epoch: int | None = None) -> None:
        """Publish a plan; the segment of a model has no lanes."""
        self._epoch = self._epoch + 1 if epoch is None else epoch
        made = tuple(
            each if isinstance(each, Segment) else segment(model=each) for each in segments
        )
        plan = PlanPublished(
            epoch=self._epoch,
            issued_at=self.now,
            leader_id="leader",
            queue=VirtualQueue(instance_id=OURS, segments=made),
            policy="test",
            work_queues=tuple(self.queues),
        )
        self.give(ev.Planned(plan=plan))

    def profile(self, profile: Profile) -> None:
        self.give(ev.Profiled(profile=profile))

    def ask(self, order: LsoCommand) -> list[LsoResult]:
        """Order an operation; return the results that operators get meanwhile."""
        before = len(self.answers)
        self.give(ev.Ordered(order=order))
        return self.answers[before:]

    def order(self, order: LsoCommand) -> LsoResult:
        """Order an operation; return its result."""
        (result,) = self.ask(order)
        return result

    def execute(self, lso: Lso) -> LsoResult:
        """Execute an operation; return its result."""
        operation = operations.start(self.instance, lso)
        self.look()
        assert operation.result is not None
        return operation.result

    def generate(self, request_id: str, num_tokens: int = 1) -> None:
        """Let a run generate tokens; *num_tokens* is the length of its answer so far."""
        run_id = self.runs[RequestId(request_id)].run_id
        held = self.held(request_id)
        if held.run is not None and not held.run.begun:
            self.give(ev.Begun(run_id=run_id))
        if held.request.prompt_tokens + num_tokens > (held.run.room_tokens if held.run else 0):
            self.give(ev.Outgrown(run_id=run_id, num_tokens=num_tokens))
        self.lengths |= {run_id: num_tokens}
        self.give(ev.Loaded(engine=self._view(), lengths=dict(self.lengths)))

    def end(self, request_id: str, how: ev.RunEnd = ev.RunEnd.FINISHED) -> None:
        """End a run."""
        held, run = self.held(request_id), self.runs.pop(RequestId(request_id))
        num_tokens = self.lengths.pop(run.run_id, held.generated)
        first_at = self.now if num_tokens else None
        self.give(
            ev.Ended(run_id=run.run_id, how=how, num_tokens=num_tokens, first_token_at=first_at)
        )

    def die(self) -> None:
        """The engine dies with its runs."""
        self.active, self.engine["alive"] = None, False
        runs, self.runs = self.runs, {}
        ends = (ev.Ended(run_id=run.run_id, how=ev.RunEnd.DIED) for run in runs.values())
        self.give(ev.EngineDied(), *ends)

    def connect(self, *, is_connected: bool) -> None:
        """Lose the connection, or make a new one."""
        self.connected = is_connected
        self._connection += not is_connected
        self.give(ev.Connected() if is_connected else ev.Lost(connection=self._connection - 1))

    def wait(self, seconds: float) -> None:
        """Let time pass, with a wake whenever the instance has asked for one."""
        until, wakes = self.now + seconds, 0
        while self._wake_at <= until:
            self.now, self._wake_at = max(self.now, self._wake_at), math.inf
            self.give(ev.Wake())
            wakes += 1
            assert wakes <= _MOST_WAKES_PER_S * (1 + seconds), "the instance wakes all the time"
        self.now = until

    def release(self, *kinds: type[do.Command]) -> None:
        """Execute the commands that wait; those of *kinds* no longer wait."""
        self.waiting -= set(kinds)
        held_back, self._open = self._open, []
        for command in held_back:
            if type(command) in self.waiting:
                self._open.append(command)
            else:
                self._execute(command)

    def held(self, request_id: str) -> Held:
        """A request of the instance."""
        held = self.instance.requests.find(RequestId(request_id))
        assert held is not None, f"{request_id} is not held"
        return held

    @property
    def running(self) -> set[str]:
        return set(self.runs)

    @property
    def window(self) -> set[str]:
        return {request.request_id for request in self.instance.requests.window}

    @property
    def status(self) -> InstanceStatus:
        return views.status(self.instance, self.now, seq=1, kv_utilization=0.0, put={}, released=())

    def of(self, kind: type[C]) -> list[C]:
        """All commands of *kind* so far."""
        return [each for each in self.all if isinstance(each, kind)]

    @property
    def answers(self) -> list[LsoResult]:
        """Results that operators have got."""
        return [each.result for each in self.of(do.Answer)]

    def times(self, kind: type[do.Command]) -> list[float]:
        """Seconds since the start at which commands of *kind* came."""
        return [at for each, at in zip(self.all, self._times, strict=True) if type(each) is kind]

    def polls(self, seconds: float = 0.0, *, lane: str | None = None) -> int:
        """Number of pulls, from *lane* or all queues, in the next *seconds*."""
        before = len(self.all)
        self.wait(seconds)
        gets = (each for each in self.all[before:] if isinstance(each, do.Get))
        return sum(lane in (None, each.queue) for each in gets)

    @property
    def loads(self) -> list[ModelName]:
        """Models that the engine activated after the first one."""
        return [each.model for each in self.of(do.Load)][1:]

    def records(self, kind: type[Lso]) -> list[LsoResult]:
        """Results of the operations of *kind* that have ended."""
        records = [each for each in self.of(do.Record) if isinstance(each.lso, kind)]
        return [each.result for each in records if each.result is not None]

    def outcome(self, request_id: str) -> str:
        """How a request has left, in words."""
        return self.departed[RequestId(request_id)].how

    def requeued(self, request_id: str) -> do.Requeueing:
        """The last requeueing of a request that has left."""
        (publication,) = self.departed[RequestId(request_id)].publications
        assert isinstance(publication, do.Requeueing)
        return publication

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.Get(queue=queue):
                self._get(queue)
            case do.Submit():
                self.runs[command.request.request_id] = command
            case do.Abort(run_id=run_id):
                self._abort(run_id)
            case do.Depart():
                self._depart(command)
            case do.Renew():
                self._renew(command)
            case do.Count():
                self._count(command)
            case do.Claim(model=model):
                self.give(ev.Claimed(model=model, granted=self.granted))
            case do.WakeAt(at=at):
                self._wake_at = at
            case do.Call():
                self._call(command)

    def _get(self, queue: str) -> None:
        if self.connected and queue not in self.absent and self.queues[queue]:
            self._deliveries += 1
            tag = ev.Tag(queue, self._connection, self._deliveries)
            taken = self.queues[queue].popleft()
            if isinstance(taken, do.Renew):
                copied = ev.Delivered(tag=tag, request=taken.request, renewal=taken.number)
                self.give(copied)
            else:
                self.give(ev.Delivered(tag=tag, request=taken))
            return
        outcome = ev.PullOutcome.ABSENT if queue in self.absent else ev.PullOutcome.EMPTY
        if not self.connected:
            outcome = ev.PullOutcome.UNREACHABLE
        self.give(ev.PullEnded(queue=queue, outcome=outcome, asked_at=self.now))

    def _count(self, command: do.Count) -> None:
        ready = tuple(each for each in command.queues if self.connected and self.queues[each])
        self.give(ev.Counted(ready=ready))

    def _renew(self, command: do.Renew) -> None:
        if self.connected:
            self.queues[self.instance.inbox].append(command)
            self.give(ev.Renewed(number=command.number))
        else:
            self.give(ev.Unrenewed(number=command.number))

    def _abort(self, run_id: RunId) -> None:
        for request_id in [name for name, run in self.runs.items() if run.run_id == run_id]:
            self.end(request_id, ev.RunEnd.ABORTED)

    def _depart(self, command: do.Depart) -> None:
        self.departed[command.request.request_id] = command
        for each in command.publications:
            if isinstance(each, do.Requeueing):
                request = msgspec.structs.replace(command.request, attempts=each.attempts)
                self.queues[each.queue].append(request)
        self.give(ev.Departed(number=command.number))

    def _call(self, command: do.Call) -> None:
        if failures := self.failing[type(command)]:
            if isinstance(command, do.Load) and not self.harmless:
                self.active = None
            message = failures.pop(0)
            failed = ev.Failed(command=command.command, message=message, refused=self.harmless)
            self.give(ev.Loaded(engine=self._view()), failed)
            return
        match command:
            case do.Start():
                self.engine["alive"] = True
            case do.Load(model=model):
                assert not self.runs, "requests run during a swap"
                self.active = model
                self.warm.discard(model)
            case do.LoadWarm(model=model):
                self.warm.add(model)
            case do.Unload(model=model):
                self.warm.discard(model)
            case do.Release(model=model, queues=queues):
                if any(self.queues[queue] for queue in queues):
                    refused = ev.Failed(command=command.command, message="work", refused=True)
                    self.give(refused)
                    return
                self._forget(model)
            case do.Limit(max_running=max_running):
                self.engine["max_running"] = min(self.engine["max_running"], max_running)
        done = ev.Done(command=command.command, duration_s=0.5, acted=bool(self.runs))
        self.give(ev.Loaded(engine=self._view()), done)

    def _forget(self, model: ModelName) -> None:
        self.warm.discard(model)
        self.active = None if self.active == model else self.active

    def _view(self) -> ev.EngineView:
        kinds = dict.fromkeys(self.instance.models, Residency.COLD)
        kinds |= dict.fromkeys(self.warm, Residency.WARM)
        if self.active is not None:
            kinds[self.active] = Residency.ACTIVE
        states = tuple(
            ModelState(model=model, residency=kind, activate_s=1.0, warm_bytes=2000)
            for model, kind in kinds.items()
        )
        return ev.EngineView(**({"model": self.active, "models": states} | self.engine))
