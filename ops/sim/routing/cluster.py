"""Instances behind one router, in virtual time: placement, dispatch and outcomes."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ops.sim.limits import EngineLimits
from ops.sim.routing.engine import (
    LIMITS,
    NO_SLOWDOWN,
    NOISE,
    RoutedReplica,
    RoutedSimRequest,
    Slowdown,
)
from ops.sim.routing.fronts import Front, Learner, Routers, RouterSeat
from ops.sim.routing.workload import RoutedArrival
from shared.contracts.base import InstanceId, RequestId, Seconds, UnixTime
from solver.routing.admission_queue import Assignment
from solver.routing.options import RoutingOptions
from solver.routing.request import PrefillPredictor, RoutedRequest
from solver.scheduling.engine.latency import LatencyTable

REPORT_S = 1.0
"""
Interval between two reports of an instance; between reports, the router gets first tokens only.
"""
_MAX_BACKLOG_S = 600.0
"""Delay after the last arrival at which a simulation is aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCluster:
    """Parameters of engines that differ only in their pace."""

    latency: LatencyTable
    num_instances: int = 4
    scale: float = 1.0
    """Factor by which all times of the latency profile are multiplied."""
    paces: tuple[float, ...] = ()
    """Additional factor of the times of each instance; empty: 1 for all instances."""
    limits: EngineLimits = LIMITS
    noise: float = NOISE
    slowdown: Slowdown = NO_SLOWDOWN
    seed: int = 0

    @property
    def instance_ids(self) -> list[InstanceId]:
        """Ids of the instances, in order of their numbers."""
        return [InstanceId(f"instance {number}") for number in range(self.num_instances)]

    def replicas(self) -> dict[InstanceId, RoutedReplica]:
        """New replicas of the engine, each with its own noise."""
        return {
            InstanceId(f"instance {number}"): RoutedReplica(
                self.latency,
                scale=self.scale * (self.paces[number] if self.paces else 1.0),
                slowdown=self.slowdown,
                random=np.random.default_rng((self.seed, number)),
                limits=self.limits,
                noise=self.noise,
            )
            for number in range(self.num_instances)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOutcome:
    """Result of one simulation of routed instances."""

    requests: list[RoutedSimRequest]
    """Requests of the simulation in order of arrival."""
    assignments: dict[RequestId, Assignment]
    fallen_back: list[tuple[UnixTime, bool]]
    """Time of each first token, and whether the router was in fallback at this time."""
    end_s: Seconds


def simulate_routing(
    arrivals: Sequence[RoutedArrival],
    cluster: RoutingCluster,
    options: RoutingOptions,
    predictor: PrefillPredictor,
    learner: Learner | None = None,
) -> RoutingOutcome:
    """Serve *arrivals* behind one router to their end; deterministic."""
    seat = RouterSeat(predictor, learner)
    front = Routers(cluster.instance_ids, options, [seat], cluster.seed)
    return simulate_front(arrivals, cluster, front)


def simulate_front(
    arrivals: Sequence[RoutedArrival], cluster: RoutingCluster, front: Front
) -> RoutingOutcome:
    """Serve *arrivals* behind the front *front*, which has served nothing yet."""
    return _Run(arrivals, cluster, front).outcome()


class _Run:
    def __init__(
        self, arrivals: Sequence[RoutedArrival], cluster: RoutingCluster, front: Front
    ) -> None:
        self._requests = [
            RoutedSimRequest(RequestId(str(number)), each) for number, each in enumerate(arrivals)
        ]
        self._replicas = cluster.replicas()
        self._front = front
        self._numbers = count()
        self._events: list[tuple[UnixTime, int, InstanceId | None]] = []
        """Events: ends of iterations; an event without an instance is a round of reports."""
        self._busy = set[InstanceId]()
        self._by_id = {request.request_id: request for request in self._requests}
        self._routed: dict[RequestId, RoutedRequest] = {}
        self._assignments: dict[RequestId, Assignment] = {}
        self._fallen_back: list[tuple[UnixTime, bool]] = []

    def outcome(self) -> RoutingOutcome:
        self._push(REPORT_S, None)
        last_at = self._requests[-1].arrival.arrived_at
        now, index, num_left = 0.0, 0, len(self._requests)
        while num_left and now < last_at + _MAX_BACKLOG_S:
            arriving = self._requests[index] if index < len(self._requests) else None
            if arriving is not None and arriving.arrival.arrived_at <= self._events[0][0]:
                now, index = arriving.arrival.arrived_at, index + 1
                self._submit(arriving, now)
            else:
                now, _, instance_id = heapq.heappop(self._events)
                if instance_id is None:
                    self._report(now)
                else:
                    num_left -= self._end_iteration(instance_id, now)
            self._dispatch(now)
        return RoutingOutcome(
            requests=self._requests,
            assignments=self._assignments,
            fallen_back=self._fallen_back,
            end_s=now,
        )

    def _submit(self, request: RoutedSimRequest, now: UnixTime) -> None:
        asked = request.asked
        matches = {
            instance_id: replica.cache.match_tokens(asked)
            for instance_id, replica in self._replicas.items()
        }
        routed = RoutedRequest(
            request_id=request.request_id,
            tenant=asked.tenant,
            arrived_at=now,
            prompt_tokens=asked.arrival.prompt_tokens,
            max_tokens=asked.max_tokens,
            slo=asked.arrival.slo,
            cached_tokens=matches,
        )
        self._routed[request.request_id] = routed
        self._front.submit(routed, now)

    def _report(self, now: UnixTime) -> None:
        loads = {each: replica.report(now) for each, replica in self._replicas.items()}
        self._front.report(loads, now)
        self._push(now + REPORT_S, None)

    def _end_iteration(self, instance_id: InstanceId, now: UnixTime) -> int:
        """Report the iteration's progress to the router; return the number of ended requests."""
        self._busy.discard(instance_id)
        progress = self._replicas[instance_id].taken_progress()
        for request in progress.first_tokens:
            self._fallen_back.append((now, self._front.is_fallen_back))
            self._front.first_token(self._routed[request.request_id], _prefill_s(request), now)
        for request in progress.finished:
            self._front.finish(request.request_id, now)
        return len(progress.finished)

    def _dispatch(self, now: UnixTime) -> None:
        for assignment in self._front.dispatch(now):
            self._assignments[assignment.request.request_id] = assignment
            request = self._by_id[assignment.request.request_id]
            self._replicas[assignment.instance_id].add(request)
        for instance_id, replica in self._replicas.items():
            if instance_id not in self._busy and replica.num_unfinished:
                duration_s = replica.iterate(now)
                if duration_s <= 0:
                    raise RuntimeError(f"{instance_id} computes no token although it has requests")
                self._busy.add(instance_id)
                self._push(now + duration_s, instance_id)

    def _push(self, at: UnixTime, instance_id: InstanceId | None) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), instance_id))


def _prefill_s(request: RoutedSimRequest) -> Seconds | None:
    """
    Prefill time of a request; None if the request was preempted, because the time then includes a
    delay.
    """
    if request.num_preempted:
        return None
    assert request.first_token_at is not None
    assert request.scheduled_at is not None
    return request.first_token_at - request.scheduled_at
