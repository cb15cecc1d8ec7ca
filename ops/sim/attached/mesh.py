"""The instances of a mesh in front of attached servers, with queues instead of a broker."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count

import msgspec

from ops.sim.attached.fronts import LoadRequest
from ops.sim.attached.servers import Server, ServerRun
from ops.sim.attached.timeline import Timeline
from services.agent.backends.remote.backend import (
    FIRST_LIMIT,
    UNSURE_PERIOD_S,
    WATCH_PERIOD_S,
)
from services.agent.backends.remote.telemetry import Streams
from shared.contracts.base import (
    InstanceId,
    ModelName,
    RequestId,
    RunId,
    Seconds,
    TenantId,
    UnixTime,
)
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.lanes import LaneLayout, relegated_name
from shared.contracts.plans import LaneQuota, PlanPublished, Segment, VirtualQueue
from shared.contracts.requests import ModelRef, Progress, QueuedRequest, Sampling
from shared.contracts.telemetry import Capability, ModelState, Residency
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.admission.turns import Turns
from solver.instance.instance import Instance
from solver.instance.state import InstanceSettings
from solver.planning.lanes import lane_for
from solver.scheduling.concurrency import ConcurrencyLimit, FleetLimits
from solver.scheduling.server_priority import server_priority

MODEL = ModelName("served")
GROUPED_S: Seconds = 0.005
"""Time from a producer's publish to the notice at the instances."""
GET_S: Seconds = 0.002
"""Time of a pull."""
SUBMIT_S: Seconds = 0.003
"""
Time from an instance to its server, and of a first token back to the client; with those above, the
10 ms that an idle mesh of processes takes.
"""
CONFIRM_S: Seconds = 0.003
"""Time of a confirmed publish."""
LOOK_S: Seconds = 0.1
"""Period of the engine's state."""
MOST_RUNNING = 256
"""Requests that a server gets at most at once."""
PLAN_S: Seconds = 1.0
"""Period of plans."""
_KV_TOKENS = 1_000_000


class Mesh:
    """
    Instances with one server each.

    Args:
        timeline: Time of the simulation.
        servers: The servers.
        published: Latency model that the estimator has published.
    """

    def __init__(
        self, timeline: Timeline, servers: Sequence[Server], published: LatencyCoefficients
    ) -> None:
        self.timeline = timeline
        self.profile = Profile(
            model=MODEL, engine="vllm", device="cpu", version=1, at=0.0, latency=published
        )
        self.queues: dict[str, deque[QueuedRequest]] = {relegated_name(MODEL): deque()}
        self.tag_numbers = count()
        self.turns = Turns(lambda: timeline.now, timeline.after)
        self.limits = FleetLimits()
        self._layout = LaneLayout()
        self._load: dict[RequestId, LoadRequest] = {}
        self._instances: list[_AttachedInstance] = []
        for number, server in enumerate(servers):
            settings = InstanceSettings(
                instance_id=InstanceId(f"attached-{number}"),
                incarnation=f"{number}-",
                engine="vllm",
                device="cpu",
                capabilities=frozenset({Capability.CALLS}),
                layout=self._layout,
            )
            self._instances.append(_AttachedInstance(self, server, settings))

    @property
    def num_evicted(self) -> int:
        """Number of runs that the instances have ended to begin others."""
        return sum(each.instance.totals.evicted for each in self._instances)

    def send(self, wanted: LoadRequest) -> None:
        """Group a request, and put it into its lane."""
        self.timeline.after(GROUPED_S, partial(self._group, wanted))

    def load_request(self, request_id: RequestId) -> LoadRequest:
        """The request of the load with this id."""
        return self._load[request_id]

    def put(self, queue: str, request: QueuedRequest) -> None:
        """Put a request into a queue, and notify the instances."""
        self.queues.setdefault(queue, deque()).append(request)
        for instance in self._instances:
            instance.handle(ev.Noticed(queue=queue))

    def _group(self, wanted: LoadRequest) -> None:
        now = self.timeline.now
        request_id = RequestId(f"r{len(self._load)}")
        self._load[request_id] = wanted
        deadline_at = wanted.slo.planning_deadline_at(wanted.outcome.arrived_at)
        lane = lane_for(
            model=MODEL,
            importance=wanted.importance,
            time_left_s=deadline_at - now,
            work_tokens=wanted.prompt_tokens + wanted.output_tokens,
            layout=self._layout,
        ).queue_name
        request = QueuedRequest(
            request_id=request_id,
            model=ModelRef(name=MODEL, base=MODEL),
            prompt_tokens=wanted.prompt_tokens,
            sampling=Sampling(max_tokens=wanted.output_tokens, ignore_eos=True),
            expected_tokens=wanted.output_tokens,
            slo=wanted.slo,
            arrived_at=wanted.outcome.arrived_at,
            grouped_at=now,
            tenant=TenantId("t"),
            lane=lane,
            importance=wanted.importance,
            reply_to="replies",
        )
        self.put(lane, request)


class _AttachedInstance:
    """One instance with its server."""

    def __init__(self, mesh: Mesh, server: Server, settings: InstanceSettings) -> None:
        self._mesh, self._server, self._timeline = mesh, server, mesh.timeline
        self._id = settings.instance_id
        self._model: ModelName | None = None
        self._runs: dict[RunId, ServerRun] = {}
        self._unsettled: dict[ev.Tag, QueuedRequest] = {}
        self._wake_at: UnixTime | None = None
        self._epoch = 0
        self._streams = Streams(lambda: self._timeline.now)
        self._limit = ConcurrencyLimit(most=MOST_RUNNING, first=FIRST_LIMIT)
        mesh.limits.join("", self._limit)
        facts = ev.ModelFacts(model=MODEL, kv_bytes_per_token=1)
        self.instance = Instance(settings, {MODEL: facts}, self._timeline.now)
        mesh.turns.join(self.instance)
        self.handle(ev.Loaded(engine=self._view()))
        self.handle(ev.Started(initial=MODEL))
        self.handle(ev.Profiled(profile=mesh.profile))
        self._plan()
        self._look()
        self._measure()

    def handle(self, event: ev.Event) -> None:
        """Give an event to the instance, and begin its commands."""
        for command in self.instance.handle(event, self._timeline.now):
            self._execute(command)

    def _execute(self, command: do.Command) -> None:
        after = self._timeline.after
        match command:
            case do.Get(queue=queue):
                self._get(queue)
            case do.Submit():
                self._submit(command)
            case do.Abort(run_id=run_id):
                self._abort(run_id)
            case do.Depart():
                after(CONFIRM_S, partial(self._departed, command))
            case do.Return(tags=tags):
                self._return(tags)
            case do.Load():
                self._model = command.model
                after(0.0, partial(self._loaded, command))
            case do.WakeAt(at=at):
                self._wake_at = at
                self._timeline.at(at, partial(self._wake, at))
            case _:  # logs, reports and what this mesh has no use for
                pass

    def _view(self) -> ev.EngineView:
        residency = Residency.COLD if self._model is None else Residency.ACTIVE
        return ev.EngineView(
            alive=True,
            model=self._model,
            waiting=self._streams.num_waiting,
            max_running=self._limit.limit,
            spare_running=self._limit.spare,
            most_run=self._streams.most_begun,
            longest_gap_s=self._streams.longest_gap_s,
            kv_capacity_tokens=_KV_TOKENS,
            models=(ModelState(model=MODEL, residency=residency),),
        )

    def _plan(self) -> None:
        """Publish a plan with all queues, each second as a leader does."""
        self._epoch += 1
        lanes = tuple(LaneQuota(lane=queue, quota=100) for queue in self._mesh.queues)
        queue = VirtualQueue(instance_id=self._id, segments=(Segment(model=MODEL, lanes=lanes),))
        plan = PlanPublished(
            epoch=self._epoch,
            issued_at=self._timeline.now,
            leader_id="leader",
            queue=queue,
            policy="p",
            work_queues=tuple(self._mesh.queues),
        )
        self.handle(ev.Planned(plan=plan))
        self._timeline.after(PLAN_S, self._plan)

    def _look(self) -> None:
        lengths = {run_id: run.num_generated for run_id, run in self._runs.items()}
        self.handle(ev.Loaded(engine=self._view(), lengths=lengths))
        self._timeline.after(LOOK_S, self._look)

    def _measure(self) -> None:
        """Look at the metrics of the server, or at what its answers show."""
        streams, server = self._streams, self._server
        if server.is_vllm:
            waiting: float = server.num_waiting
            ours_waiting = streams.num_waiting
            running, has_waited = server.num_running, streams.has_waited
        else:
            waiting = ours_waiting = streams.num_prefilling if streams.is_stuck else 0
            running, has_waited = streams.num_begun, True
        is_found = self._limit.queue_seen(
            running=running,
            waiting=waiting,
            ours=len(self._runs),
            ours_waiting=ours_waiting,
            ours_prefilling=ours_waiting,
            has_waited=has_waited,
        )
        if is_found:
            self._mesh.limits.found(self._limit)
        is_unsure = streams.num_waiting and not self._limit.is_sure
        self._timeline.after(UNSURE_PERIOD_S if is_unsure else WATCH_PERIOD_S, self._measure)

    def _get(self, queue: str) -> None:
        """Pull from *queue* when it is this instance's turn."""
        asking = self._mesh.turns.ask(
            self.instance,
            queue,
            lambda: self._timeline.after(
                GET_S,
                lambda: self._mesh.turns.ended(
                    asking, self._got(queue, self._timeline.now - GET_S)
                ),
            ),
            lambda nothing: self._timeline.after(0.0, partial(self.handle, nothing)),
        )

    def _got(self, name: str, asked_at: UnixTime) -> ev.PullEnded | None:
        """Handle the end of a pull; return it if there was no request."""
        queue = self._mesh.queues.get(name)
        if not queue:
            outcome = ev.PullOutcome.ABSENT if queue is None else ev.PullOutcome.EMPTY
            nothing = ev.PullEnded(queue=name, outcome=outcome, asked_at=asked_at)
            self.handle(nothing)
            return nothing
        request = queue.popleft()
        tag = ev.Tag(name, 1, next(self._mesh.tag_numbers))
        self._unsettled[tag] = request
        self.handle(ev.Delivered(tag=tag, request=request))
        return None

    def _submit(self, command: do.Submit) -> None:
        request, wanted = command.request, self._mesh.load_request(command.request.request_id)
        run = ServerRun(
            prompt_tokens=request.prompt_tokens,
            output_tokens=wanted.output_tokens,
            priority=server_priority(command.slo, request.arrived_at),
            on_token=partial(self._on_token, command.run_id, wanted),
        )
        self._runs[command.run_id] = run
        self._streams.submitted(command.run_id, request.prompt_tokens)
        self._timeline.after(SUBMIT_S, partial(self._server.submit, run))

    def _on_token(self, run_id: RunId, wanted: LoadRequest, num_tokens: int) -> None:
        if run_id not in self._runs:
            return
        wanted.on_token(num_tokens, self._timeline.now)
        self._streams.received(run_id, 1)
        if num_tokens == 1:
            self.handle(ev.Begun(run_id=run_id))
        if self._runs[run_id].is_over:
            self._end(run_id, ev.RunEnd.FINISHED, wanted)

    def _end(self, run_id: RunId, how: ev.RunEnd, wanted: LoadRequest) -> None:
        if self._runs.pop(run_id, None) is None:
            return
        self._streams.ended(run_id)
        self.handle(
            ev.Ended(
                run_id=run_id,
                how=how,
                num_tokens=wanted.outcome.num_tokens,
                first_token_at=wanted.outcome.first_token_at,
            )
        )

    def _abort(self, run_id: RunId) -> None:
        run, held = self._runs.get(run_id), self.instance.requests.of_run(run_id)
        if run is None or held is None:
            return
        self._server.abort(run)
        wanted = self._mesh.load_request(held.request_id)
        self._timeline.after(SUBMIT_S, partial(self._end, run_id, ev.RunEnd.ABORTED, wanted))

    def _departed(self, command: do.Depart) -> None:
        for each in command.publications:
            if isinstance(each, do.Requeueing):
                wanted = self._mesh.load_request(command.request.request_id)
                progress = Progress(
                    token_ids=(0,) * wanted.outcome.num_tokens,
                    first_token_at=wanted.outcome.first_token_at,
                )
                self._mesh.put(
                    each.queue,
                    msgspec.structs.replace(
                        command.request, attempts=each.attempts, progress=progress
                    ),
                )
        for tag in command.tags:
            self._unsettled.pop(tag, None)
        self.handle(ev.Departed(number=command.number))

    def _return(self, tags: tuple[ev.Tag, ...]) -> None:
        for tag in tags:
            request = self._unsettled.pop(tag, None)
            if request is not None:
                self._mesh.queues[tag.queue].appendleft(request)

    def _loaded(self, command: do.Load) -> None:
        self.handle(ev.Loaded(engine=self._view()))
        self.handle(ev.Done(command=command.command))

    def _wake(self, at: UnixTime) -> None:
        if self._wake_at == at:
            self._wake_at = None
            self.handle(ev.Wake())
