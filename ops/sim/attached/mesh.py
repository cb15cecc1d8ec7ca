"""The instances of a mesh in front of attached servers, with queues instead of a broker."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count

import msgspec

from ops.sim.attached.fronts import LoadRequest
from ops.sim.attached.servers import MAX_RUNNING, Server, ServerRun
from ops.sim.attached.timeline import Timeline
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
from solver.instance.instance import Instance
from solver.instance.state import InstanceSettings
from solver.planning.lanes import lane_for
from solver.scheduling.server_priority import server_priority

MODEL = ModelName("served")
GROUPED_S: Seconds = 0.01
"""Time from a producer's publish to the notice at the instances."""
GET_S: Seconds = 0.008
"""Time of a pull."""
SUBMIT_S: Seconds = 0.005
"""Time from an instance to its server; with those above, 23 ms in an idle mesh of processes."""
CONFIRM_S: Seconds = 0.003
"""Time of a confirmed publish."""
LOOK_S: Seconds = 0.1
"""Period of the engine's state."""
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
        self._layout = LaneLayout()
        self._load: dict[RequestId, LoadRequest] = {}
        self._instances: list[_AttachedInstance] = []
        for number, server in enumerate(servers):
            settings = InstanceSettings(
                instance_id=InstanceId(f"attached-{number}"),
                incarnation=f"{number}-",
                engine="vllm",
                device="cpu",
                capabilities=frozenset({Capability.RESUME}),
                layout=self._layout,
            )
            self._instances.append(_AttachedInstance(self, server, settings))

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
        facts = ev.ModelFacts(model=MODEL, kv_bytes_per_token=1)
        self.instance = Instance(settings, {MODEL: facts}, self._timeline.now)
        self.handle(ev.Loaded(engine=self._view()))
        self.handle(ev.Started(initial=MODEL))
        self.handle(ev.Profiled(profile=mesh.profile))
        self._plan()
        self._look()

    def handle(self, event: ev.Event) -> None:
        """Give an event to the instance, and begin its commands."""
        for command in self.instance.handle(event, self._timeline.now):
            self._execute(command)

    def _execute(self, command: do.Command) -> None:
        after = self._timeline.after
        match command:
            case do.Get(queue=queue):
                after(GET_S, partial(self._got, queue, self._timeline.now))
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
            waiting=self._server.num_waiting,
            max_running=MAX_RUNNING,
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
        lengths = {
            run_id: run.num_generated + self._before(run_id) for run_id, run in self._runs.items()
        }
        self.handle(ev.Loaded(engine=self._view(), lengths=lengths))
        self._timeline.after(LOOK_S, self._look)

    def _before(self, run_id: RunId) -> int:
        """Answer tokens before a run."""
        held = self.instance.requests.of_run(run_id)
        return 0 if held is None else held.request.progress.num_tokens

    def _got(self, name: str, asked_at: UnixTime) -> None:
        queue = self._mesh.queues.get(name)
        if not queue:
            outcome = ev.PullOutcome.ABSENT if queue is None else ev.PullOutcome.EMPTY
            self.handle(ev.PullEnded(queue=name, outcome=outcome, asked_at=asked_at))
            return
        request = queue.popleft()
        tag = ev.Tag(name, 1, next(self._mesh.tag_numbers))
        self._unsettled[tag] = request
        self.handle(ev.Delivered(tag=tag, request=request))

    def _submit(self, command: do.Submit) -> None:
        request, wanted = command.request, self._mesh.load_request(command.request.request_id)
        before = wanted.outcome.num_tokens
        run = ServerRun(
            prompt_tokens=request.prompt_tokens + before,
            output_tokens=wanted.output_tokens - before,
            priority=server_priority(command.slo, request.arrived_at),
            on_token=partial(self._on_token, command.run_id, wanted, before),
        )
        self._runs[command.run_id] = run
        self._timeline.after(SUBMIT_S, partial(self._server.submit, run))

    def _on_token(self, run_id: RunId, wanted: LoadRequest, before: int, num_tokens: int) -> None:
        if run_id not in self._runs:
            return
        wanted.on_token(before + num_tokens, self._timeline.now)
        if num_tokens == 1:
            self.handle(ev.Begun(run_id=run_id))
        if self._runs[run_id].is_over:
            self._end(run_id, ev.RunEnd.FINISHED, wanted)

    def _end(self, run_id: RunId, how: ev.RunEnd, wanted: LoadRequest) -> None:
        if self._runs.pop(run_id, None) is None:
            return
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
