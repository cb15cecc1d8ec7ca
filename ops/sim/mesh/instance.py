"""One instance of the simulated mesh: follows its virtual queue with LSOs (QLM §5)."""

import math
from collections.abc import Iterable, Sequence

from ops.sim.mesh.change import ModelChange
from ops.sim.mesh.conduct import Conduct
from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.kinds import DeviceKind, Fleet
from ops.sim.mesh.lanes import MeshLanes
from ops.sim.mesh.limits import BatchLimits, BatchTotals
from ops.sim.mesh.request import MeshRequest
from ops.sim.mesh.sight import Sight, is_infeasible, situation_of
from ops.sim.mesh.weights import HostWeights
from ops.sim.mesh.window import QueueInForce
from shared.contracts.base import InstanceId, ModelName, UnixTime
from shared.contracts.plans import Segment
from solver.planning.lso.actions import lso_actions
from solver.planning.lso.operations import Activate, Cool, Evict, Lso, SwapOut, Warm
from solver.planning.lso.situation import HeadChange


class MeshInstance:
    """
    An instance in virtual time.

    The caller calls `follow` with each plan, and `wake` at the time `wake_at()`.

    Args:
        lanes: Queues of waiting requests.
        conduct: How the instance follows plans.
        max_running: Limit of running requests in the instance's engine.
        initial: The model that is active at the start.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        device: DeviceKind,
        fleet: Fleet,
        lanes: MeshLanes,
        conduct: Conduct,
        *,
        max_running: int,
        initial: ModelName | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.device = device
        self.totals = BatchTotals()
        self.num_swaps = 0
        self.active: ModelName | None = None
        self.active_since: UnixTime = -math.inf
        self.change: ModelChange | None = None
        self.engine: BatchEngine | None = None
        self.swapped: list[MeshRequest] = []
        """Swapped-out requests of the active model, whose KV is in host memory."""
        self.ahead: list[MeshRequest] = []
        """Pulled requests of models that are not active."""
        self.weights = HostWeights(
            {model: fleet.models[model] for model in fleet.fitting(device)},
            budget_bytes=conduct.warm_bytes,
            swap_scale=fleet.swap_scale,
        )
        self._fleet = fleet
        self._lanes = lanes
        self._conduct = conduct
        self._max_running = max_running
        self._queue = QueueInForce(lanes, conduct.key)
        self._head: Segment | None = None
        """Last head of the virtual queue for which the instance executed LSOs."""
        self._finished: list[MeshRequest] = []
        if initial is not None:
            self.weights.activated(initial)
            self.active, self.engine = initial, self._engine(initial, 0.0)

    def take_finished(self) -> list[MeshRequest]:
        """Remove and return requests that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wake_at(self) -> UnixTime:
        """Time of the instance's next event."""
        engine_at = self.engine.wake_at() if self.engine is not None else math.inf
        if self.change is None:
            return engine_at
        if self.change.ready_at is not None:
            return self.change.ready_at
        return min(self.change.drain_until, engine_at)

    def get_ready(self, now: UnixTime) -> None:
        """Prepare for a new plan: put requests that have not begun back into their lanes."""
        self._catch_up(now)
        if self._conduct.gives_back:
            self._give_back()

    def follow(self, segments: Sequence[Segment], now: UnixTime) -> None:
        """Follow a new plan; call `get_ready` before."""
        self._queue.follow(segments)
        self._continue(now)
        if self.change is None and self.engine is not None and self.engine.num_waiting:
            self._act(self._queue.segments(), now)
            self._continue(now)

    def wake(self, now: UnixTime) -> None:
        """Process the events of the instance that are due at the time *now*."""
        self._catch_up(now)
        self._continue(now)
        engine = self.engine
        if engine is not None and engine.now <= now and engine.wake_at() <= now:
            engine.iterate()
            self._collect(engine)

    def lose(self, now: UnixTime) -> None:
        """
        Simulate the death of the instance: its requests return to their lanes without progress.
        """
        self._catch_up(now)
        self._give_back()
        runs = [*self._running(), *self.swapped]
        self._evict(self._running())
        self._drop(self.swapped)
        for run in runs:
            run.restart()
        self.engine, self.active, self.change = None, None, None

    def notice(self, model: ModelName, now: UnixTime) -> None:
        """Handle the arrival of a request in a lane of *model*."""
        if self.change is None and model == self.active:
            self._catch_up(now)
            self._continue(now)

    @property
    def sight(self) -> Sight:
        """Data for selecting LSOs that are not part of the instance's state."""
        return Sight(fleet=self._fleet, conduct=self._conduct, answers=self._lanes.answers)

    def _catch_up(self, now: UnixTime) -> None:
        if self.engine is not None:
            self.engine.catch_up(now)
            self._collect(self.engine)

    def _collect(self, engine: BatchEngine) -> None:
        self._finished += engine.take_finished()

    def _continue(self, now: UnixTime) -> None:
        """
        Swap models, pull and execute LSOs until no further action is possible at the time *now*.
        """
        while True:
            if self.change is not None and not self._changed(self.change, now):
                return
            self._refill(now)
            segments = self._other_head()
            if not segments:
                return
            self._act(segments, now)
            if self.change is None:
                return

    def _changed(self, change: ModelChange, now: UnixTime) -> bool:
        """Continue the model swap *change*; return whether the swap is complete."""
        if change.ready_at is None:
            engine = self.engine
            if engine is not None and engine.num_running and now < change.drain_until:
                return False
            if engine is not None:
                self._evict(engine.running())
                now = max(now, engine.now)
            change.ready_at = now + self.weights.activate_s(change.model, now)
            self.weights.activated(change.model)
            if self.active is not None:
                self.weights.park(self.active, now)
            self.engine, self.active = None, None
            self.num_swaps += 1
        if now < change.ready_at:
            return False
        self.active, self.engine = change.model, self._engine(change.model, change.ready_at)
        self.active_since, self.change = change.ready_at, None
        return True

    def _engine(self, model: ModelName, now: UnixTime) -> BatchEngine:
        how = self._fleet.served(self.device, model)
        if how is None:
            raise ValueError(f"{self.device.name} cannot serve {model}")
        kv_bytes = self._fleet.models[model].kv_bytes_per_token
        limits = BatchLimits(
            kv_capacity_tokens=how.kv_capacity_tokens,
            max_running=self._max_running,
            static_batch=self._conduct.static_batch,
            restore_s_per_token=kv_bytes / self.device.host_link_bytes_per_s,
        )
        return BatchEngine(how.latency, limits, self.totals, now=now)

    def _refill(self, now: UnixTime) -> None:
        """Pull requests until the window of the instance is full."""
        engine = self.engine
        if engine is not None:
            for held in [each for each in self.ahead if each.model == self.active]:
                self.ahead.remove(held)
                self._begin(held, engine, now)
        while self._num_held() < self._conduct.window:
            request = self._pull()
            if request is None:
                break
            if is_infeasible(self, self.sight, request, now):
                self._lanes.relegate(request, now)
            elif engine is not None and request.model == self.active:
                self._begin(request, engine, now)
            else:
                self.ahead.append(request)
        if engine is not None and not engine.num_waiting and self.swapped:
            self._begin(self.swapped.pop(0), engine, now)

    def _num_held(self) -> int:
        return len(self.ahead) + (self.engine.num_waiting if self.engine is not None else 0)

    def _pull(self) -> MeshRequest | None:
        """The next request for the window; None while the queue's head has another model."""
        queue = self._queue
        if not self._conduct.looks_ahead:
            queue.drop_served()
            segments = queue.segments()
            if segments and segments[0].model != self.active:
                return None
            if segments:
                return queue.pull_urgent() if self._conduct.shares else queue.pull_head()
        elif (request := queue.pull_any()) is not None:
            return request
        return None if self.active is None else queue.pull_spare(self.active)

    def _begin(self, request: MeshRequest, engine: BatchEngine, now: UnixTime) -> None:
        request.instance_id = self.instance_id
        engine.add(request, now)

    def _other_head(self) -> tuple[Segment, ...]:
        """Segments of the virtual queue if its head requires a model swap now; else empty."""
        engine = self.engine
        if self._conduct.looks_ahead:
            idle = engine is None or not engine.num_unfinished
            return (Segment(model=self.ahead[0].model),) if idle and self.ahead else ()
        if engine is not None and engine.num_waiting:
            return ()
        segments = self._queue.segments()
        return segments if segments and segments[0].model != self.active else ()

    def _act(self, segments: tuple[Segment, ...], now: UnixTime) -> None:
        """Execute the LSOs that the new head of the virtual queue requires."""
        change = HeadChange(old_head=self._head, queue=segments)
        self._head = change.head
        for lso in lso_actions(change, situation_of(self, self.sight, now), self._conduct.rules):
            self._carry_out(lso, now)

    def _carry_out(self, lso: Lso, now: UnixTime) -> None:
        match lso:
            case Evict(request_ids=ids):
                self._evict([r for r in self._running() if r.request_id in ids])
                self._drop([r for r in self.swapped if r.request_id in ids])
            case SwapOut(request_id=request_id):
                for run in [r for r in self._running() if r.request_id == request_id]:
                    assert self.engine is not None
                    self.engine.swap_out(run)
                    run.num_swapped += 1
                    self.swapped.append(run)
            case Activate(model=model, drain_s=drain_s):
                self._give_back()
                self._drop(self.swapped)
                self.change = ModelChange(model=model, drain_until=now + drain_s)
            case Warm(model=model):
                self.weights.warm(model, now)
            case Cool(model=model):
                self.weights.cool(model)

    def _running(self) -> list[MeshRequest]:
        return self.engine.running() if self.engine is not None else []

    def _evict(self, runs: Iterable[MeshRequest]) -> None:
        """
        Evict the runs *runs*: put their requests back into their lanes with their answers so far.
        """
        gone = list(runs)
        for run in gone:
            assert self.engine is not None
            self.engine.evict(run)
            run.num_evicted += 1
        self._lanes.put_back(gone)

    def _drop(self, swapped: list[MeshRequest]) -> None:
        """Drop the KV of swapped-out requests and put them back into their lanes."""
        gone = list(swapped)
        for run in gone:
            run.forget()
            run.num_evicted += 1
        self.swapped = [run for run in self.swapped if run not in gone]
        self._lanes.put_back(gone)

    def _give_back(self) -> None:
        """Put requests that have not begun back into their lanes; swapped-out requests stay."""
        waiting = self.engine.take_waiting() if self.engine is not None else []
        self.swapped = [run for run in waiting if run.kept_tokens] + self.swapped
        fresh = [run for run in waiting if not run.kept_tokens]
        self._lanes.put_back([*fresh, *self.ahead])
        self.ahead = []
