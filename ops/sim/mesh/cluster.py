"""The simulated mesh: events of arrivals, plans and instances in order of time."""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ops.sim.mesh.conduct import Conduct
from ops.sim.mesh.idle import IdleTimes
from ops.sim.mesh.instance import MeshInstance
from ops.sim.mesh.kinds import Fleet
from ops.sim.mesh.lanes import AnswerLengths, MeshLanes
from ops.sim.mesh.planners import MeshPlanner, Profiles
from ops.sim.mesh.profiling import measured
from ops.sim.mesh.request import MeshRequest
from ops.sim.mesh.sight import view_of
from ops.sim.request import Arrival
from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from solver.planning.problem.snapshot import InstanceView

PlannerFactory = Callable[[Profiles], MeshPlanner]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArrival:
    """One arrival of a workload for several models."""

    model: ModelName
    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Death of an instance; its requests immediately begin again on other instances."""

    number: int
    """Index of the instance that dies."""
    at: UnixTime
    noticed_after_s: Seconds = 5.0
    """Time after the death until plans exclude the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """Parameters of a simulation of the mesh."""

    fleet: Fleet
    conduct: Conduct
    planner: PlannerFactory
    plan_period_s: Seconds = 1.0
    max_running: int = 128
    until_s: Seconds = math.inf
    """Time at which the simulation ends at the latest."""
    losses: tuple[Loss, ...] = ()
    """Deaths of instances in order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOutcome:
    """Outcome of a simulation of the mesh."""

    requests: list[MeshRequest]
    """Requests of the simulation in order of arrival."""
    end_s: Seconds
    num_swaps: int
    busy_s: Seconds
    """Busy time of the instances, summed over all instances."""
    kv_share_s: Seconds
    """Integral over time of the used share of KV memory, summed over all instances."""
    wasted_tokens: int
    restored_tokens: int
    tokens: int
    num_plans: int
    plan_cpu_s: Seconds
    cpu_s: Seconds
    idle: IdleTimes


class Mesh:
    """
    Instances and lanes in virtual time.

    Args:
        requests: The whole traffic, in order of arrival.
        profiles: Profiles of all models on all devices.
    """

    def __init__(
        self, requests: Sequence[MeshRequest], profiles: Profiles, options: MeshOptions
    ) -> None:
        answers = AnswerLengths(requests)
        self.lanes = MeshLanes(answers)
        self.instances = [
            MeshInstance(
                InstanceId(f"{device.name}-{number}"),
                device,
                options.fleet,
                self.lanes,
                options.conduct,
                max_running=options.max_running,
                initial=_initial(options.fleet, number),
            )
            for number, device in enumerate(options.fleet.devices)
        ]
        self.num_plans = 0
        self.plan_cpu_s = 0.0
        self.idle = IdleTimes()
        self._options = options
        self._profiles = profiles
        self._planner = options.planner(profiles)
        self._arrivals = deque(requests)
        self._losses = deque(options.losses)
        self._lost: set[int] = set()
        self._num_left = len(requests)
        self._wakes: list[tuple[UnixTime, int, int]] = []
        self._wake_at = [math.inf] * len(self.instances)
        self._numbers = count()
        self._turn = 0

    def run(self) -> UnixTime:
        """Serve all requests, or until `until_s`; return the simulated time of the end."""
        now, plan_at = 0.0, 0.0
        while self._num_left:
            arrive_at = self._arrivals[0].arrival.arrived_at if self._arrivals else math.inf
            wake_at = self._wakes[0][0] if self._wakes else math.inf
            lose_at = self._losses[0].at if self._losses else math.inf
            now = min(arrive_at, wake_at, plan_at, lose_at)
            if now >= self._options.until_s:
                return self._options.until_s
            if lose_at <= now:
                self._lose(self._losses.popleft(), now)
            elif arrive_at <= now:
                self._arrive(now)
            elif wake_at <= now:
                self._wake(now)
            else:
                self._plan(now)
                plan_at = now + self._options.plan_period_s
        return now

    def view(self, instance: MeshInstance, now: UnixTime) -> InstanceView:
        """The planner's view of the instance *instance*."""
        known = None
        if instance.active is not None:
            known = self._profiles.get((instance.device.name, instance.active))
        rates = known.rates if known else None
        return view_of(instance, instance.sight, rates, self.lanes.waiting_models(), now)

    def _arrive(self, now: UnixTime) -> None:
        request = self._arrivals.popleft()
        self.lanes.put(request, now)
        self._turn += 1
        for number in range(len(self.instances)):
            if self.lanes.head(request.lane) is None:
                return
            index = (self._turn + number) % len(self.instances)
            instance = self.instances[index]
            if instance.active == request.model and instance.change is None:
                instance.notice(request.model, now)
                self._settle(index)

    def _wake(self, now: UnixTime) -> None:
        at, _, index = heapq.heappop(self._wakes)
        if at == self._wake_at[index]:
            self._wake_at[index] = math.inf
            self.instances[index].wake(now)
            self._settle(index)

    def _lose(self, loss: Loss, now: UnixTime) -> None:
        self._lost.add(loss.number)
        self.instances[loss.number].lose(now)
        self._settle(loss.number)

    def _planned_for(self, now: UnixTime) -> list[int]:
        """All instances except instances whose death was noticed."""
        known = {
            loss.number for loss in self._options.losses if loss.at + loss.noticed_after_s <= now
        }
        return [number for number in range(len(self.instances)) if number not in known]

    def _plan(self, now: UnixTime) -> None:
        began = time.process_time()
        planned_for = self._planned_for(now)
        alive = [self.instances[number] for number in planned_for if number not in self._lost]
        self.idle.look(alive, self.lanes, self._planner.kept, now)
        for number in planned_for:
            self.instances[number].get_ready(now)
        if self.lanes.num_waiting:
            views = [self.view(self.instances[number], now) for number in planned_for]
            queues = self._planner.plan(self.lanes, views, now)
            self.num_plans += 1
            self.plan_cpu_s += time.process_time() - began
            for number, queue in zip(planned_for, queues, strict=True):
                if number not in self._lost:
                    self.instances[number].follow(queue.segments, now)
        else:
            # No plan follows, so an idle instance must swap to the models of its requests itself.
            for number in planned_for:
                if self.instances[number].ahead:
                    self.instances[number].wake(now)
        for number in planned_for:
            self._settle(number)

    def _settle(self, index: int) -> None:
        """Collect the requests that an instance has finished, and update its next wake time."""
        instance = self.instances[index]
        self._num_left -= len(instance.take_finished())
        at = instance.wake_at()
        if at != self._wake_at[index]:
            self._wake_at[index] = at
            heapq.heappush(self._wakes, (at, next(self._numbers), index))


def _initial(fleet: Fleet, number: int) -> ModelName:
    """Initial model of the instance *number*: the models that fit its device, in turn."""
    fitting = fleet.fitting(fleet.devices[number])
    return fitting[number % len(fitting)]


def simulate_mesh(arrivals: Sequence[ModelArrival], options: MeshOptions) -> MeshOutcome:
    """Serve *arrivals*, which are in order of time, by a simulated mesh."""
    began = time.process_time()
    requests = [
        MeshRequest(number, each.arrival, each.model) for number, each in enumerate(arrivals)
    ]
    by_model: dict[ModelName, list[Arrival]] = {}
    for each in arrivals:
        by_model.setdefault(each.model, []).append(each.arrival)
    profiles = measured(options.fleet, by_model, max_running=options.max_running)
    mesh = Mesh(requests, profiles, options)
    end_s = mesh.run()
    totals = [instance.totals for instance in mesh.instances]
    return MeshOutcome(
        requests=requests,
        end_s=end_s,
        num_swaps=sum(instance.num_swaps for instance in mesh.instances),
        busy_s=sum(each.busy_s for each in totals),
        kv_share_s=sum(each.kv_share_s for each in totals),
        wasted_tokens=sum(each.wasted_tokens for each in totals),
        restored_tokens=sum(each.restored_tokens for each in totals),
        tokens=sum(each.tokens for each in totals),
        num_plans=mesh.num_plans,
        plan_cpu_s=mesh.plan_cpu_s,
        cpu_s=time.process_time() - began,
        idle=mesh.idle,
    )
