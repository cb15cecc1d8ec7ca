"""Fronts of simulated instances: routers, or a queue from which instances pull."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import numpy as np

from shared.contracts.base import InstanceId, RequestId, Seconds, UnixTime
from shared.contracts.routing import InstanceLoad
from solver.routing.admission_queue import AdmissionQueue, Assignment
from solver.routing.backlog import Backlog
from solver.routing.options import RoutingOptions
from solver.routing.request import Candidate, PrefillEstimate, PrefillPredictor, RoutedRequest
from solver.routing.router import Router
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds, counted_s

SHARE_S = 0.02
"""Interval of a router's messages about its work, while the work changes."""


class Learner(Protocol):
    """Learns from each prefill, and decides whether predictions can be trusted."""

    def observe(self, assignment: Assignment, prefill_s: Seconds) -> None:
        """Learn that a prefill took *prefill_s*."""
        ...

    @property
    def is_trusted(self) -> bool: ...


class Front(Protocol):
    """Assigns requests to instances and dispatches them; gets their outcomes."""

    @property
    def is_fallen_back(self) -> bool: ...

    def submit(self, request: RoutedRequest, now: UnixTime) -> None:
        """Add an arriving request to the front."""
        ...

    def dispatch(self, now: UnixTime) -> Sequence[Assignment]:
        """Requests to send to their instances now, in order of dispatch."""
        ...

    def first_token(self, request: RoutedRequest, prefill_s: Seconds | None, now: UnixTime) -> None:
        """
        Record a first token; *prefill_s* is the time of the prefill, or None if the prefill was
        preempted.
        """
        ...

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Record the last token of a request."""
        ...

    def report(self, loads: Mapping[InstanceId, InstanceLoad], now: UnixTime) -> None:
        """Process a round of instances' reports; routers also exchange their state."""
        ...


@dataclass(frozen=True, slots=True)
class RouterSeat:
    """Predictor and learner of one router."""

    predictor: PrefillPredictor
    learner: Learner | None = None
    share: Callable[[Sequence[Learner]], None] | None = None
    """Function that gets the learners of all other routers in each round of reports."""


class Routers:
    """
    One router, or several routers that get requests in turn and exchange their state each round.

    All routers get first tokens and their tenants immediately, as in a mesh.

    Args:
        instances: Instances behind the routers.
        options: Options of every router.
        seats: Predictor and learner of each router.
        seed: Seed of the routers' choices among candidates.
    """

    def __init__(
        self,
        instances: Sequence[InstanceId],
        options: RoutingOptions,
        seats: Sequence[RouterSeat],
        seed: int,
    ) -> None:
        self._seats = seats
        self._backlogs = [Backlog(f"router {number}") for number in range(len(seats))]
        self._routers = [
            Router(
                instances,
                options,
                seat.predictor,
                random=np.random.default_rng((seed, len(instances), *([number] if number else []))),
                backlog=backlog,
            )
            for number, (seat, backlog) in enumerate(zip(seats, self._backlogs, strict=True))
        ]
        self._exchanged_at: UnixTime = 0.0
        self._turns = cycle(range(len(seats)))
        self._of: dict[RequestId, tuple[int, Assignment]] = {}
        """Router and assignment of each request until the request has ended."""

    @property
    def is_fallen_back(self) -> bool:
        return any(router.is_fallen_back for router in self._routers)

    def submit(self, request: RoutedRequest, now: UnixTime) -> None:
        """Submit the request to the next router in turn."""
        number = next(self._turns)
        self._of[request.request_id] = (number, self._routers[number].submit(request, now))

    def dispatch(self, now: UnixTime) -> Sequence[Assignment]:
        """
        Dispatch requests on all routers, after an exchange of their work if an exchange is due.
        """
        if len(self._seats) > 1 and now >= self._exchanged_at + SHARE_S:
            self._exchange_state(now)
        return [each for router in self._routers for each in router.dispatch(now)]

    def first_token(self, request: RoutedRequest, prefill_s: Seconds | None, now: UnixTime) -> None:
        """
        Count the tenant's tokens on all routers; the request's router learns the prefill's time.
        """
        number, assignment = self._of[request.request_id]
        router, learner = self._routers[number], self._seats[number].learner
        router.first_token(request.request_id, now)
        for each in self._routers:
            each.served(request.tenant, request.prompt_tokens, now)
        if learner is None or prefill_s is None:
            return
        learner.observe(assignment, prefill_s)
        if learner.is_trusted:
            router.recover()
        else:
            router.fall_back()

    def _exchange_state(self, now: UnixTime) -> None:
        self._exchanged_at = now
        states = [backlog.snapshot() for backlog in self._backlogs]
        for number, backlog in enumerate(self._backlogs):
            for other, state in enumerate(states):
                if other != number:
                    backlog.adopt(state, now)

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Remove the request from its router."""
        number, _ = self._of.pop(request_id)
        self._routers[number].finish(request_id, now)

    def report(self, loads: Mapping[InstanceId, InstanceLoad], now: UnixTime) -> None:
        """
        Distribute the reports to all routers, and each router's observations to the other routers.
        """
        for router in self._routers:
            for instance_id, load in loads.items():
                router.observe(instance_id, load, now)
        for seat in self._seats:
            if seat.share is not None:
                others = (each.learner for each in self._seats if each is not seat)
                seat.share([each for each in others if each is not None])


class PulledQueue:
    """
    One queue in order of deadlines, from which instances with room pull.

    Equals the pulls of agents from the lanes of one model, except for the width of deadline
    bands. The instance with the least pulled work pulls first, because agents with waiting work
    poll later.

    Args:
        instances: Instances that pull.
        prefill_s: Predicted time of a prefill without cached tokens.
        bounds: Limits of an instance's pulled work.
    """

    is_fallen_back = False

    def __init__(
        self,
        instances: Sequence[InstanceId],
        prefill_s: Callable[[RoutedRequest], Seconds],
        bounds: PullBounds = DEFAULT_BOUNDS,
    ) -> None:
        self._prefill_s = prefill_s
        self._bounds = bounds
        self._queue = AdmissionQueue(lambda assignment: assignment.key)
        self._held: dict[InstanceId, dict[RequestId, Seconds]] = {each: {} for each in instances}
        """Predicted time of each pulled request without a first token, by instance."""
        self._at: dict[RequestId, InstanceId] = {}

    def submit(self, request: RoutedRequest, now: UnixTime) -> None:
        """Add the request to the queue."""
        del now
        size_s = self._prefill_s(request)
        self._queue.push(
            Assignment(
                request=request,
                candidate=Candidate(instance_id=InstanceId("")),
                estimate=PrefillEstimate(quantile_s=size_s, mean_s=size_s, watched_s=size_s),
                key=request.deadline_at,
            )
        )

    def dispatch(self, now: UnixTime) -> Sequence[Assignment]:
        """Assign requests one by one to the instance with the least pulled work, if it has room."""
        del now
        pulled = []
        while len(self._queue):
            instance_id = min(self._held, key=lambda each: sum(self._held[each].values()))
            if not self._has_room(instance_id):
                break
            head = self._queue.pop()
            assert head is not None
            request_id = head.request.request_id
            self._held[instance_id][request_id] = counted_s(head.estimate.mean_s, self._bounds)
            self._at[request_id] = instance_id
            pulled.append(
                Assignment(
                    request=head.request,
                    candidate=Candidate(instance_id=instance_id),
                    estimate=head.estimate,
                    key=head.key,
                )
            )
        return pulled

    def first_token(self, request: RoutedRequest, prefill_s: Seconds | None, now: UnixTime) -> None:
        """Remove the request from its instance's pulled work."""
        del prefill_s, now
        self._held[self._at[request.request_id]].pop(request.request_id, None)

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Remove the ended request from the pulled work."""
        del now
        self._held[self._at.pop(request_id)].pop(request_id, None)

    def report(self, loads: Mapping[InstanceId, InstanceLoad], now: UnixTime) -> None:
        """Ignore the reports, because each instance pulls by its own state."""

    def _has_room(self, instance_id: InstanceId) -> bool:
        held = self._held[instance_id]
        if not held:
            return True
        return len(held) < self._bounds.window and sum(held.values()) < self._bounds.max_backlog_s
