"""Simulation of replicas that pull late from shared lanes."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf

from ops.sim.engine import SimulatedReplica
from ops.sim.lanes import Forecast, LaneQueues
from ops.sim.request import SimRequest
from ops.sim.work import view_of
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Slo
from solver.scheduling.pull_room import (
    DEFAULT_BOUNDS,
    Held,
    PullBounds,
    counted_s,
    has_best_effort_room,
    has_room,
    is_loaded,
    work_s,
)
from solver.scheduling.pulling import WORK_WEIGHT_S_PER_TOKEN, Openings, PullOrder
from solver.scheduling.relegation import BUSY_TOKENS

_PULL, _ITERATE = 0, 1
_LAYOUT = LaneLayout()
_POLL_S = 1.0
_RETRY_S = 1e-3
"""Time until the next iteration if the policy chose no work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Options of replicas that pull."""

    bounds: PullBounds = DEFAULT_BOUNDS
    round_trip_s: Seconds = 0.002
    """Duration of one pull; 2 ms is typical of a RabbitMQ cluster of three nodes."""
    workers: int = 3
    """Number of concurrent pulls of one replica."""
    work_weight_s_per_token: Seconds = WORK_WEIGHT_S_PER_TOKEN
    layout: LaneLayout = _LAYOUT

    def with_window(self, window: int) -> "PullOptions":
        """Copy of the options with another window."""
        return replace(self, bounds=replace(self.bounds, window=window))


class LateBoundReplica(SimulatedReplica):
    """A replica that can return requests that have not begun."""

    def add_relegated(self, request: SimRequest) -> None:
        """Add *request*, relegated, to the waiting requests."""
        self._waiting[request.request_id] = request
        self._policy.add(replace(view_of(request), slo=Slo()))

    def is_waiting(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def withdraw(self, request: SimRequest) -> None:
        """Remove *request* from the waiting requests."""
        del self._waiting[request.request_id]
        self._policy.remove(request.request_id)


class _Puller:
    """One replica, its agent's view of the lanes, and its requests that have not begun."""

    def __init__(
        self,
        replica: LateBoundReplica,
        options: PullOptions,
        forecast: Forecast,
        max_running: int,
    ) -> None:
        self.replica = replica
        self.order = PullOrder(
            poll_s=_POLL_S, work_weight_s_per_token=options.work_weight_s_per_token
        )
        self.num_pulling = 0
        self.idle = True
        self.num_sources = 0
        self._bounds = options.bounds
        self._forecast = forecast
        self._max_running = max_running
        self._regular: dict[RequestId, SimRequest] = {}
        self._regular_s = 0.0
        self._best_effort: dict[RequestId, SimRequest] = {}

    def hold(self, request: SimRequest) -> None:
        """Submit the pulled request *request* to the engine."""
        self._regular[request.request_id] = request
        self._regular_s += self._counted_s(request)
        self.replica.add(request)

    def hold_best_effort(self, request: SimRequest) -> None:
        """Submit a relegated or best-effort *request* to the engine."""
        self._best_effort[request.request_id] = request
        self.replica.add_relegated(request)

    def settle(self) -> None:
        """
        Remove requests that have a first token from the window.

        Call this method only between iterations, because an iteration updates the engine's state at
        its start.
        """
        for request in [r for r in self._regular.values() if r.first_token_at is not None]:
            self._drop(request)
        for key in [k for k, r in self._best_effort.items() if r.first_token_at is not None]:
            del self._best_effort[key]

    def withdraw_late(self, now: UnixTime) -> list[SimRequest]:
        """
        Withdraw requests that wait in the engine past their deadline, since they fill the window.
        """
        late = [
            r
            for key, r in self._regular.items()
            if r.deadline_at < now and self.replica.is_waiting(key)
        ]
        for request in late:
            self._drop(request)
            self.replica.withdraw(request)
        return late

    def held(self) -> Held:
        """Pulled requests in the window, counted in the same way as by an agent."""
        best_effort_s = sum(map(self._counted_s, self._best_effort.values()))
        regular_s = self._regular_s
        free = self._max_running - self.replica.num_unfinished - self.num_pulling
        return Held(
            num_regular=len(self._regular),
            num_best_effort=len(self._best_effort),
            num_pulling=self.num_pulling,
            regular_s=work_s(prefill_s=regular_s, whole_s=regular_s, num_free_slots=free),
            best_effort_s=best_effort_s,
        )

    def is_infeasible(self, request: SimRequest, now: UnixTime) -> bool:
        """True if *request* is not relegated and would be late on this replica."""
        loaded = is_loaded(self.held(), self._bounds)
        return self._forecast.is_infeasible(
            request, now, BUSY_TOKENS if loaded else 1, self.replica.totals.pace_s
        )

    def next_queue(self, now: UnixTime) -> str | None:
        """The queue from which the replica pulls next; None if the window is full."""
        held = self.held()
        if not has_room(held, self._bounds):
            return None
        openings = Openings(yielding=has_best_effort_room(held, self._bounds))
        source = self.order.next(now, openings)
        return None if source is None else source.queue

    def _drop(self, request: SimRequest) -> None:
        del self._regular[request.request_id]
        self._regular_s -= self._counted_s(request)
        if not self._regular:
            self._regular_s = 0.0

    def _counted_s(self, request: SimRequest) -> float:
        return counted_s(self._forecast.prefill_s(request), self._bounds)


class PullingCluster:
    """
    Replicas in virtual time that share lanes.

    An engine's policy chooses among the requests that its agent has pulled.

    Args:
        replicas: Idle replicas.
        forecast: Predicted work of requests.
        max_running: Limit of running requests of each replica.
    """

    def __init__(
        self,
        replicas: Sequence[LateBoundReplica],
        options: PullOptions,
        forecast: Forecast,
        *,
        max_running: int,
    ) -> None:
        self._pullers = [_Puller(each, options, forecast, max_running) for each in replicas]
        self._options = options
        self._forecast = forecast
        self._lanes = LaneQueues(options.layout, forecast)
        self._events: list[tuple[UnixTime, int, int, int, str]] = []
        self._numbers = count()
        self._turn = 0
        self._ends = [0.0] * len(replicas)

    def run(self, requests: Sequence[SimRequest], *, until: UnixTime | None = None) -> list[float]:
        """
        Serve *requests*, which are in order of arrival.

        Returns:
            Time at which each replica's last iteration ended or the simulation stopped.
        """
        arrivals = deque(requests)
        while arrivals or self._events:
            while arrivals and (
                not self._events or arrivals[0].arrival.arrived_at <= self._events[0][0]
            ):
                self._arrive(arrivals.popleft())
            if not self._events:
                continue
            now, kind, _, index, queue = heapq.heappop(self._events)
            if until is not None and now >= until:
                return [
                    end if puller.idle else until
                    for puller, end in zip(self._pullers, self._ends, strict=True)
                ]
            if kind == _PULL:
                self._pull(now, index, queue)
            else:
                self._iterate(now, index, stuck=not arrivals and not self._events)
        return self._ends

    def _arrive(self, request: SimRequest) -> None:
        now = request.arrival.arrived_at
        self._notify(self._lanes.put(request, now), now)

    def _notify(self, queue: str, now: UnixTime) -> None:
        """
        Notify replicas, in rotating order, of a request in *queue*; replicas with room pull.
        """
        self._turn += 1
        for number in range(len(self._pullers)):
            index = (self._turn + number) % len(self._pullers)
            puller = self._pullers[index]
            self._see_sources(puller, now)
            puller.order.nonempty(queue, now)
            self._start_pulls(index, now)

    def _see_sources(self, puller: _Puller, now: UnixTime) -> None:
        if puller.num_sources != len(self._lanes.sources):
            puller.num_sources = len(self._lanes.sources)
            puller.order.set_sources(self._lanes.sources, now)

    def _start_pulls(self, index: int, now: UnixTime) -> None:
        puller, options = self._pullers[index], self._options
        while puller.num_pulling < options.workers:
            queue = puller.next_queue(now)
            if queue is None:
                return
            puller.num_pulling += 1
            self._push(now + options.round_trip_s, _PULL, index, queue)

    def _pull(self, now: UnixTime, index: int, queue: str) -> None:
        puller = self._pullers[index]
        puller.num_pulling -= 1
        request = self._lanes.take(queue)
        if request is None:
            puller.order.empty(queue, now)
        else:
            self._take(now, index, queue, request)
        self._start_pulls(index, now)

    def _take(self, now: UnixTime, index: int, queue: str, request: SimRequest) -> None:
        puller = self._pullers[index]
        puller.order.pulled(queue, request.deadline_at, self._forecast.work_tokens(request))
        if self._lanes.is_relegated(request) or request.deadline_at == inf:
            puller.hold_best_effort(request)
        elif puller.is_infeasible(request, now):
            self._notify(self._lanes.relegate(request), now)
            return
        else:
            puller.hold(request)
        if puller.idle:
            puller.idle = False
            self._push(now, _ITERATE, index, "")

    def _iterate(self, now: UnixTime, index: int, *, stuck: bool) -> None:
        puller = self._pullers[index]
        self._ends[index] = now
        puller.settle()
        for request in puller.withdraw_late(now):
            self._notify(self._lanes.relegate(request), now)
        self._start_pulls(index, now)
        if not puller.replica.num_unfinished:
            puller.idle = True
            return
        duration_s = puller.replica.iterate(now)
        if duration_s <= 0:
            if stuck and not self._events:
                raise RuntimeError("the policy computes no token and no request will arrive")
            duration_s = _RETRY_S
        self._push(now + duration_s, _ITERATE, index, "")

    def _push(self, at: UnixTime, kind: int, index: int, queue: str) -> None:
        heapq.heappush(self._events, (at, kind, next(self._numbers), index, queue))
