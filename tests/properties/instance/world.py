"""A world around an instance: broker, engine, operators and time, driven by a list of choices."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from shared.contracts.base import InstanceId, ModelName, RequestId, RunId
from shared.contracts.control import (
    EvictRequest,
    LsoActivate,
    LsoCheckpoint,
    LsoClear,
    LsoCommand,
    LsoPreempt,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
)
from shared.contracts.ends import DEADLINE_EXPIRED, nearest_end
from shared.contracts.lanes import LaneLayout, inbox_name
from shared.contracts.plans import LaneQuota, PlanPublished, Segment, VirtualQueue
from shared.contracts.qos import OnLate, Slo
from shared.contracts.requests import Attempts, ErrorInfo, ModelRef, QueuedRequest, Sampling
from shared.contracts.telemetry import Capability, ModelState, Residency
from solver.instance import commands as do
from solver.instance import end
from solver.instance import events as ev
from solver.instance.events import Tag
from solver.instance.instance import Instance
from solver.instance.request import Held, Phase
from solver.instance.state import InstanceSettings

OURS = InstanceId("ours")
MODELS = (ModelName("m"), ModelName("n"))
LANES = {model: f"lane.2.{model}.high.3.w0" for model in MODELS}
NAMES = tuple(RequestId(f"r{number}") for number in range(4))
INBOX = inbox_name(OURS)
CAPACITY, MAX_RUNNING = 200, 2
TIMEOUT_S = 20.0


class WrongError(AssertionError):
    """The instance has done what it must never do."""


@dataclass(slots=True)
class Message:
    """A request in a queue of the broker."""

    request: QueuedRequest
    tag: Tag | None = None
    """Set while the message is delivered and unsettled."""
    renewal: int | None = None
    """Number of the held request of which the message is a copy."""


@dataclass(slots=True)
class EngineRun:
    """A run on the engine."""

    number: int
    request: QueuedRequest
    room_tokens: int
    num_tokens: int
    aborted: bool = False
    begun: bool = False


@dataclass
class World:
    """
    Executes the instance's commands in any order, with any result.

    Everything that the instance waits for is an open item; `act` closes one of them, or lets
    something happen that the instance does not wait for.
    """

    now: float = 1000.0
    instance: Instance = field(init=False)
    queues: dict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))
    unsettled: dict[Tag, Message] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)
    runs: dict[RunId, EngineRun] = field(default_factory=dict)
    ended_runs: set[RunId] = field(default_factory=set)
    departures: list[do.Depart] = field(default_factory=list)
    renewals: list[do.Renew] = field(default_factory=list)
    calls: list[do.Call] = field(default_factory=list)
    counts: list[do.Count] = field(default_factory=list)
    claims: list[do.Claim] = field(default_factory=list)
    answers: list[do.Answer] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (kind of event, phase of the request that it is about)."""
    connection: int = 1
    connected: bool = True
    drained: bool = False
    exiting: bool = False
    sent: list[tuple[RequestId, str]] = field(default_factory=list)
    """Id and reply queue of each published request; together they are unique."""
    left: set[int] = field(default_factory=set)
    """Numbers of the held requests whose outcomes are published and acknowledged."""
    answered: set[tuple[RequestId, str]] = field(default_factory=set)
    """Requests with a final reply, or whose run the producer has stopped."""
    alive: bool = True
    model: ModelName | None = None
    wake_at: float = math.inf
    epoch: int = 0
    orders: int = 0
    deliveries: int = 0

    def __post_init__(self) -> None:
        settings = InstanceSettings(
            instance_id=OURS,
            incarnation="inc",
            engine="simulated",
            device="cpu",
            capabilities=frozenset(Capability),
            layout=LaneLayout(),
            swap_lease_s=5.0,
            consumer_timeout_s=TIMEOUT_S,
        )
        models = {
            name: ev.ModelFacts(model=name, weight_bytes=100, kv_bytes_per_token=2)
            for name in MODELS
        }
        self.instance = Instance(settings, models, self.now)
        self.handle(ev.Loaded(engine=self.view()))
        self.handle(ev.Started(initial=MODELS[0]))

    def view(self) -> ev.EngineView:
        """Present state of the engine."""
        return ev.EngineView(
            alive=self.alive,
            model=self.model,
            waiting=0,
            max_running=MAX_RUNNING,
            kv_capacity_tokens=CAPACITY,
            models=tuple(
                ModelState(
                    model=name,
                    residency=Residency.ACTIVE if name == self.model else Residency.COLD,
                    activate_s=1.0,
                    warm_bytes=10,
                )
                for name in MODELS
            ),
            warm_capacity_bytes=100,
            host_kv_capacity_bytes=1000,
        )

    def handle(self, event: ev.Event) -> None:
        """Give *event* to the instance, and begin its commands."""
        self._note(event)
        for command in self.instance.handle(event, self.now):
            EXECUTE[type(command)](self, command)
        self.check()

    def act(self, choice: int) -> None:
        """Let one thing happen, selected by *choice*."""
        actions = list(self.actions())
        actions[choice % len(actions)](choice // len(actions))

    def actions(self) -> Iterator[Callable[[int], None]]:
        """Everything that can happen now."""
        for index in range(min(2, len(self.gets))):
            yield lambda how, index=index: self.end_get(index, how)
        for run_id in tuple(self.runs)[:3]:
            yield lambda how, run_id=run_id: self.advance_run(run_id, how)
            yield lambda how, run_id=run_id: self.advance_run(run_id, how)
        for index in range(min(2, len(self.departures))):
            yield lambda how, index=index: self.end_departure(index, how)
        for index in range(min(2, len(self.renewals))):
            yield lambda how, index=index: self.end_renewal(index, how)
        if self.calls:
            yield self.end_call
        if self.counts:
            yield lambda _how: self.end_count()
        if self.claims:
            yield lambda how: self.end_claim(granted=how % 3 > 0)
        yield self.publish
        yield self.publish
        yield self.order
        yield self.order
        yield self.pass_time
        yield self.seldom

    def seldom(self, how: int) -> None:
        """Faults, plans and notices."""
        faults = (
            self.lose_connection,
            self.kill_engine,
            self.stall,
            self.retire,
            self.return_inbox,
            self.drain,
            self.plan,
            self.plan,
            self.cancel,
            self.cancel,
        )
        faults[how % len(faults)](how // len(faults))

    def held(self) -> list[Held]:
        """Requests of the instance; only the resting ones, if there are any: they are rare."""
        held = [*self.instance.requests]
        return [each for each in held if each.phase is Phase.RESTING] or held

    # What the instance waits for

    def end_get(self, index: int, how: int) -> None:
        """Answer a pull."""
        queue = self.gets.pop(index)
        ready = [message for message in self.queues[queue] if message.tag is None]
        if not self.connected:
            outcome = ev.PullOutcome.UNREACHABLE
        elif ready and how % 8 != 7:
            self.deliveries += 1
            message = ready[0]
            message.tag = Tag(queue, self.connection, self.deliveries)
            self.unsettled[message.tag] = message
            self.handle(
                ev.Delivered(tag=message.tag, request=message.request, renewal=message.renewal)
            )
            return
        elif ready and how % 16 == 7:
            outcome = ev.PullOutcome.UNREACHABLE
        elif ready:
            self.queues[queue].remove(ready[0])  # it was not a request
            self.answered.add(_key(ready[0].request))
            outcome = ev.PullOutcome.DEAD_LETTERED
        else:
            outcome = (ev.PullOutcome.EMPTY, ev.PullOutcome.ABSENT)[how % 2]
        self.handle(ev.PullEnded(queue=queue, outcome=outcome, asked_at=self.now))

    def advance_run(self, run_id: RunId, how: int) -> None:
        """Let a run generate tokens, or end it."""
        run = self.runs[run_id]
        if run.aborted and how % 4:
            self.end_run(run_id, ev.RunEnd.ABORTED)
            return
        ends = (
            ev.RunEnd.FINISHED,
            ev.RunEnd.FINISHED,
            ev.RunEnd.FINISHED,
            ev.RunEnd.FINISHED,
            ev.RunEnd.REFUSED,
            ev.RunEnd.NOT_ACTIVE,
            ev.RunEnd.BROKEN,
        )
        if how % 6 == 0:
            self.end_run(run_id, ends[how // 6 % len(ends)])
            return
        if how % 7 == 1:
            self.handle(ev.Rendered(run_id=run_id, prompt_tokens=10 + how % 60))
        began = not run.begun
        run.begun = True
        run.num_tokens += 1 + how % 16
        if began:
            self.handle(ev.Begun(run_id=run_id))
        if run_id in self.runs and run.request.prompt_tokens + run.num_tokens > run.room_tokens:
            self.handle(ev.Outgrown(run_id=run_id, num_tokens=run.num_tokens))

    def end_run(self, run_id: RunId, how: ev.RunEnd) -> None:
        """End a run."""
        run = self.runs.pop(run_id)
        self.ended_runs.add(run_id)
        error = ErrorInfo(message="no", code="no") if how is ev.RunEnd.REFUSED else None
        first_at = self.now if run.num_tokens else None
        self.handle(
            ev.Ended(
                run_id=run_id,
                how=how,
                num_tokens=run.num_tokens,
                first_token_at=first_at,
                error=error,
            )
        )

    def end_departure(self, index: int, how: int) -> None:
        """Confirm or refuse the messages of a departure; without a connection neither happens."""
        if not self.connected:
            return
        departure = self.departures.pop(index)
        if how % 8 == 7:
            self.handle(ev.Stranded(number=departure.number))
            return
        for each in departure.publications:
            self._publish(departure, each)
        self._acknowledge(departure.tags)
        self.left.add(departure.number)
        self.handle(ev.Departed(number=departure.number))

    def end_renewal(self, index: int, how: int) -> None:
        """Publish a copy to the inbox: once, twice after a lost confirm, or not."""
        renewal = self.renewals.pop(index)
        num_copies = (1, 1, 1, 2, 0, 1)[how % 6]
        for _ in range(num_copies):
            self.queues[INBOX].append(Message(renewal.request, renewal=renewal.number))
        if how % 12 == 0 and num_copies:
            self._get_now(INBOX)  # the copy comes before the confirm
        if how % 6 < 4:
            self.handle(ev.Renewed(number=renewal.number))
        else:
            self.handle(ev.Unrenewed(number=renewal.number))

    def _get_now(self, queue: str) -> None:
        if queue in self.gets:
            self.end_get(self.gets.index(queue), 0)

    def end_call(self, how: int) -> None:
        """Answer a call of the engine."""
        call = self.calls.pop(0)
        if how % 5 == 4 or not (self.alive or isinstance(call, do.Start)):
            if isinstance(call, do.Load) and how % 2:
                self.model = None
            self.handle(ev.Loaded(engine=self.view()))
            self.handle(ev.Failed(command=call.command, message="no", refused=how % 2 == 0))
            return
        if isinstance(call, do.Start):
            self.alive = True
        elif isinstance(call, do.Load):
            if self.runs:
                raise WrongError("the model changes while requests run")
            self.model = call.model
        self.handle(ev.Loaded(engine=self.view()))
        self.handle(ev.Done(command=call.command, duration_s=0.1, acted=how % 2 == 0))

    def end_count(self) -> None:
        """Count queues."""
        count = self.counts.pop(0)
        ready = tuple(
            queue
            for queue in count.queues
            if any(message.tag is None for message in self.queues[queue])
        )
        self.handle(ev.Counted(ready=ready))

    def end_claim(self, *, granted: bool) -> None:
        """Answer a claim."""
        claim = self.claims.pop(0)
        self.handle(ev.Claimed(model=claim.model, granted=granted))

    # What happens without the instance

    def publish(self, how: int) -> None:
        """Put a request into a lane."""
        model = MODELS[how % 16 == 7]
        resting = [each for each in self.instance.requests if each.phase is Phase.RESTING]
        slo = (Slo(), Slo(ttft_s=5.0), Slo(ttlt_s=60.0))[how // 8 % 3]
        lives_s = (None, None, None, 0.0, 0.4, 3.0, 15.0)[how // 24 % 7]
        request = QueuedRequest(
            request_id=resting[0].request_id if resting and how % 2 else NAMES[how % len(NAMES)],
            model=ModelRef(name=model, base=model),
            prompt_tokens=10 + how % 50,
            sampling=Sampling(max_tokens=64),
            expected_tokens=8 + how % 32,
            slo=slo,
            arrived_at=self.now - how % 3,
            grouped_at=self.now,
            tenant="t",
            lane=LANES[model],
            reply_to=f"reply.{len(self.sent)}",
            attempts=Attempts(crashes=2 if how % 16 == 5 else 0),
            expires_at=None if lives_s is None else self.now + lives_s,
            on_late=OnLate.DROP if how // 168 % 2 else OnLate.SERVE,
        )
        self.sent.append(_key(request))
        self.queues[LANES[model]].append(Message(request))
        if self.connected:
            self.handle(ev.Noticed(queue=LANES[model]))

    def plan(self, how: int) -> None:
        """Publish a plan."""
        self.epoch += 1
        first, second = MODELS if how % 12 else MODELS[::-1]
        lanes = {model: (LaneQuota(lane=LANES[model], quota=1),) for model in MODELS}
        segments = (Segment(model=first, lanes=lanes[first]),)
        if how % 2:
            segments += (Segment(model=second, lanes=lanes[second]),)
        queue = VirtualQueue(instance_id=OURS, segments=() if how % 16 == 15 else segments)
        self.handle(
            ev.Planned(
                plan=PlanPublished(
                    epoch=self.epoch,
                    issued_at=self.now,
                    leader_id="leader",
                    queue=queue,
                    policy="p",
                    work_queues=tuple(self.queues),
                )
            )
        )

    def order(self, how: int) -> None:
        """Order an operation."""
        self.orders += 1
        kinds: tuple[Callable[[str, RequestId], LsoCommand], ...] = (
            lambda key, name: EvictRequest(instance_id=OURS, command_id=key, request_id=name),
            lambda key, name: LsoSwapOut(instance_id=OURS, command_id=key, request_id=name),
            lambda key, name: LsoSwapOut(
                instance_id=OURS, command_id=key, request_id=name, rest_s=2.0
            ),
            lambda key, name: LsoSwapIn(instance_id=OURS, command_id=key, request_id=name),
            lambda key, name: LsoCheckpoint(instance_id=OURS, command_id=key, request_id=name),
            lambda key, _name: LsoPull(instance_id=OURS, command_id=key, count=2),
            lambda key, _name: LsoClear(instance_id=OURS, command_id=key),
            lambda key, _name: LsoWarm(instance_id=OURS, command_id=key, model=MODELS[1]),
            lambda key, _name: LsoPreempt(instance_id=OURS, command_id=key),
            lambda key, _name: LsoSet(instance_id=OURS, command_id=key, max_running=3),
            lambda key, _name: LsoActivate(
                instance_id=OURS, command_id=key, model=MODELS[self.orders % 8 == 0]
            ),
        )
        kind, rest = kinds[how % len(kinds)], how // len(kinds)
        held = self.held()
        names = [each.request_id for each in held] if held and rest % 4 else NAMES
        repeats = how % 7 == 6
        self.handle(ev.Ordered(order=kind(f"o{self.orders - repeats}", names[rest % len(names)])))

    def cancel(self, how: int) -> None:
        """Cancel a request, or stop a run."""
        held = self.held()
        if held and how % 2:
            each = held[how // 2 % len(held)]
            self.handle(
                ev.Cancelled(
                    request_id=each.request_id,
                    reply_to=each.request.reply_to,
                    user=each.request.tenant,
                )
            )
        elif self.runs:
            run_id = tuple(self.runs)[how // 2 % len(self.runs)]
            request_id = self.runs[run_id].request.request_id
            self.answered.add(_key(self.runs[run_id].request))
            self.handle(ev.RunStopped(request_id=request_id, run_id=run_id))

    def pass_time(self, how: int) -> None:
        """Let time pass, at most until the instance wants to wake."""
        step_s = (0.01, 0.1, 0.3, 0.5, 2.0, 6.0, 11.0)[how % 7]
        if self.wake_at <= self.now + step_s:
            self.now = max(self.now, self.wake_at)
            self.wake_at = math.inf
            self.handle(ev.Wake())
        else:
            self.now += step_s

    def lose_connection(self, _how: int) -> None:
        """Lose the connection: the broker requeues what is unsettled, and connect again."""
        for message in self.unsettled.values():
            message.tag = None
        self.unsettled.clear()
        self.connection += 1
        self.handle(ev.Lost(connection=self.connection - 1))
        self.handle(ev.Connected())

    def kill_engine(self, how: int) -> None:
        """The engine dies with its runs; the runs or the engine report it first."""
        if not self.alive:
            return
        self.alive, self.model = False, None
        if how % 2:
            self.handle(ev.EngineDied())
        for run_id in tuple(self.runs):
            self.end_run(run_id, ev.RunEnd.DIED)
        if not how % 2:
            self.handle(ev.EngineDied())

    def stall(self, how: int) -> None:
        """The process does not run for a while."""
        self.now += how % 20
        self.handle(ev.Stalled(missed_s=float(how % 20)))

    def retire(self, how: int) -> None:
        """The leader retires a lane."""
        queue = LANES[MODELS[how % 2]]
        self.handle(ev.Retiring(queues=(queue,)))
        self.handle(ev.Retired(kept=(queue,)))

    def return_inbox(self, _how: int) -> None:
        """A leader that considers the instance dead returns the ready requests of its inbox."""
        for message in [each for each in self.queues[INBOX] if each.tag is None]:
            self.queues[INBOX].remove(message)
            attempts = message.request.attempts
            again = msgspec.structs.replace(attempts, hop=attempts.hop + 1)
            request = msgspec.structs.replace(message.request, attempts=again)
            self.queues[end.return_queue(request)].append(Message(request))

    def drain(self, how: int) -> None:
        """Drain the instance, seldom."""
        if how % 4 == 0 and not self.exiting:
            self.exiting = True
            self.handle(ev.Draining(drain_s=1.0))

    # Commands

    def _get(self, command: do.Get) -> None:
        if self.drained:
            raise WrongError("a drained instance pulls")
        self.gets.append(command.queue)

    def _submit(self, command: do.Submit) -> None:
        if command.run_id in self.runs or command.run_id in self.ended_runs:
            raise WrongError("the id of a run is not unique")
        if command.request.model.base != self.model:
            raise WrongError("a request is submitted to another model")
        others = self.runs.values()
        if self.runs and command.room_tokens + sum(run.room_tokens for run in others) > CAPACITY:
            raise WrongError("a request is submitted beyond the room of the engine")
        if len(self.runs) >= MAX_RUNNING:
            raise WrongError("too many requests run")
        crashes = [run.request.attempts.crashes for run in others]
        if self.runs and max(*crashes, command.request.attempts.crashes) >= 2:
            raise WrongError("a request that is suspected of crashes does not run alone")
        held = next(each for each in self.instance.requests if each.number == command.number)
        messages = [self.unsettled[tag] for tag in held.tags if tag in self.unsettled]
        if any(message.renewal in self.left for message in messages):
            raise WrongError("a copy of a request that has left is served")
        num_tokens = self._progress(command.number)
        if nearest_end(command.request, has_begun=num_tokens > 0).at <= self.now:
            raise WrongError("a request is submitted after its end")
        self.runs[command.run_id] = EngineRun(
            command.number, command.request, command.room_tokens, num_tokens
        )

    def _progress(self, number: int) -> int:
        return next(held.generated for held in self.instance.requests if held.number == number)

    def _abort(self, command: do.Abort) -> None:
        run = self.runs.get(command.run_id)
        if run is None:
            raise WrongError("an unknown run is aborted")
        if run.aborted:
            raise WrongError("a run is aborted twice")
        run.aborted = True

    def _reserve(self, command: do.Reserve) -> None:
        if command.run_id in self.runs:
            self.runs[command.run_id].room_tokens = command.room_tokens

    def _depart(self, command: do.Depart) -> None:
        if any(each.number == command.number for each in self.departures):
            raise WrongError("a request departs twice")
        self.departures.append(command)

    def _call(self, command: do.Call) -> None:
        self.calls.append(command)

    def _return(self, command: do.Return) -> None:
        for tag in command.tags:
            if tag.connection == self.connection:
                self.unsettled.pop(tag).tag = None

    def _discard(self, command: do.Discard) -> None:
        self._acknowledge(command.tags)

    def _renew(self, command: do.Renew) -> None:
        if any(each.number == command.number for each in self.renewals):
            raise WrongError("a request is renewed twice at a time")
        self.renewals.append(command)

    def _wake(self, command: do.WakeAt) -> None:
        self.wake_at = command.at

    def _drained(self, _command: do.Drained) -> None:
        if self.runs or self.departures:
            raise WrongError("the instance is drained and holds requests")
        self.drained = True

    def _ignore(self, _command: do.Command) -> None:
        pass

    def _publish(self, departure: do.Depart, each: do.Publication) -> None:
        match each:
            case do.Completion():
                self.answered.add(_key(departure.request))
            case do.Failure(error=error):
                self.answered.add(_key(departure.request))
                if error.code == DEADLINE_EXPIRED and not self._may_end(departure.request):
                    raise WrongError("a request without an end, or before it, ends as expired")
            case do.Requeueing():
                request = msgspec.structs.replace(departure.request, attempts=each.attempts)
                self.queues[each.queue].append(Message(request))
            case do.DeadLetter():
                pass

    def _may_end(self, request: QueuedRequest) -> bool:
        return nearest_end(request, has_begun=False).at <= self.now

    def _acknowledge(self, tags: tuple[Tag, ...]) -> None:
        for tag in tags:
            if tag.connection != self.connection:
                continue  # the broker has requeued it
            message = self.unsettled.pop(tag, None)
            if message is None:
                raise WrongError("a delivery is settled twice")
            self.queues[tag.queue].remove(message)

    def _note(self, event: ev.Event) -> None:
        """Record the phase of the request that an event is about."""
        match event:
            case ev.Delivered():
                about = [event.request.request_id]
            case ev.Cancelled():
                about = [event.request_id]
            case ev.Ordered():
                about = [getattr(event.order, "request_id", None)]
            case _:
                about = [getattr(event, "run_id", None), getattr(event, "number", None)]
        for held in (*self.instance.requests, *self.instance.requests.leaving):
            run_id = None if held.run is None else held.run.run_id
            names = {held.request_id, held.number, run_id} - {None}
            if not names.isdisjoint(about):
                self.seen.add((type(event).__name__, held.phase.value))

    # What must hold after every event

    def check(self) -> None:
        """Check the invariants."""
        requests, room = self.instance.requests, self.instance.room
        running = {held.run.run_id for held in requests.runs if held.run is not None}
        if running != set(self.runs):
            raise WrongError(f"orphaned runs: {running ^ set(self.runs)}")
        for held in requests.runs:
            is_ending = held.phase is Phase.ENDING
            if held.run is not None and self.runs[held.run.run_id].aborted != is_ending:
                raise WrongError("a run is aborted in one of instance and engine only")
        reserved = sum(held.run.room_tokens for held in requests.runs if held.run is not None)
        if room.reserved_tokens != reserved:
            raise WrongError(f"{room.reserved_tokens} tokens reserved instead of {reserved}")
        self._check_ends()
        waiting = sum(held.phase is Phase.WAITING for held in requests)
        if room.num_window != waiting or len(requests.window) != waiting:
            raise WrongError("the window and the phases differ")
        if room.num_running != len(running):
            raise WrongError("the number of running requests is wrong")
        ahead = sum(held.ahead for held in requests)
        held = room.held(self.instance.engine, 0)
        if held.num_requests != ahead:
            raise WrongError(f"{held.num_requests} requests ahead instead of {ahead}")
        known = [
            tag
            for each in (*requests, *requests.leaving)
            for tag in each.tags
            if tag.connection == self.connection
        ]
        if len(known) != len(set(known)) or set(known) != set(self.unsettled):
            raise WrongError("an unsettled delivery belongs to no request, or to several")
        queued = {_key(each.request) for queue in self.queues.values() for each in queue}
        if lost := set(self.sent) - queued - self.answered:
            raise WrongError(f"requests would be lost if the process died now: {lost}")

    def _check_ends(self) -> None:
        for held in self.instance.requests:
            num_tokens = held.generated
            if held.run is not None:
                num_tokens = max(num_tokens, self.runs[held.run.run_id].num_tokens)
            is_over = nearest_end(held.request, has_begun=num_tokens > 0).at <= self.now
            if is_over and held.phase is not Phase.ENDING:
                raise WrongError(f"a request is {held.phase.value} after its end")

    def finish(self) -> None:
        """Close all open items without faults; then nothing may be left but queued requests."""
        for _ in range(5000):
            if not self._close_one():
                break
        if self.unsettled:
            phases = [held.phase for held in self.instance.requests]
            raise WrongError(f"requests are stuck: {phases}")
        if self._copies_left():
            raise WrongError("copies of renewed requests stay in the inbox")

    def _close_one(self) -> bool:
        """Close one open item; return False if there is none."""
        run_id = next(iter(self.runs), None)
        if self.calls:
            self.end_call(0)
        elif self.departures:
            self.end_departure(0, 0)
        elif self.renewals:
            self.end_renewal(0, 1)
        elif self.gets:
            self.end_get(0, 0)
        elif self.counts or self.claims:
            self._close_planless()
        elif run_id is not None:
            aborted = self.runs[run_id].aborted
            self.end_run(run_id, ev.RunEnd.ABORTED if aborted else ev.RunEnd.FINISHED)
        elif self.unsettled or self.instance.scripts.busy or self._copies_left():
            self.now, self.wake_at = max(self.now, self.wake_at), math.inf
            if self.now == math.inf:
                raise WrongError("the instance waits for nothing, and holds requests")
            self.handle(ev.Wake())
        else:
            return False
        return True

    def _copies_left(self) -> bool:
        """True if copies are in the inbox that the instance still has to pull."""
        return not self.drained and any(
            each.renewal is not None and _key(each.request) in self.answered
            for each in self.queues[INBOX]
        )

    def _close_planless(self) -> None:
        if self.counts:
            self.end_count()
        else:
            self.end_claim(granted=False)


def _key(request: QueuedRequest) -> tuple[RequestId, str]:
    return request.request_id, request.reply_to or ""


EXECUTE: dict[type[do.Command], Callable[[World, object], None]] = {
    do.Get: World._get,
    do.Submit: World._submit,
    do.Abort: World._abort,
    do.Reserve: World._reserve,
    do.Depart: World._depart,
    do.Return: World._return,
    do.Renew: World._renew,
    do.Discard: World._discard,
    do.WakeAt: World._wake,
    do.Drained: World._drained,
    do.Count: lambda world, command: world.counts.append(command),
    do.Claim: lambda world, command: world.claims.append(command),
    do.Answer: lambda world, command: world.answers.append(command),
    **dict.fromkeys(do.CALLS, World._call),
    **dict.fromkeys(
        (do.Record, do.Say, do.Report, do.ReportActivation, do.Prepared, do.Unclaim),
        World._ignore,
    ),
}
