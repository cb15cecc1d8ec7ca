"""What stands before simulated instances: routers, or a queue that instances pull from."""

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
"""Between two messages of a router about its work, while that changes."""


class Learner(Protocol):
    """Learns from each prefill, and says whether predictions can be trusted."""

    def observe(self, assignment: Assignment, prefill_s: Seconds) -> None:
        """A prefill took so long."""
        ...

    @property
    def is_trusted(self) -> bool: ...


class Front(Protocol):
    """Decides where requests go, and when; told what becomes of them."""

    @property
    def is_fallen_back(self) -> bool: ...

    def submit(self, request: RoutedRequest, now: UnixTime) -> None:
        """A request has come."""
        ...

    def dispatch(self, now: UnixTime) -> Sequence[Assignment]:
        """Requests that go to their instances now, in order."""
        ...

    def first_token(self, request: RoutedRequest, prefill_s: Seconds | None, now: UnixTime) -> None:
        """It was prefilled in *prefill_s*; none of a prefill that was preempted."""
        ...

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Its last token is there."""
        ...

    def report(self, loads: Mapping[InstanceId, InstanceLoad], now: UnixTime) -> None:
        """What instances tell of themselves; the round in which routers tell each other."""
        ...


@dataclass(frozen=True, slots=True)
class RouterSeat:
    """One of the routers, with whoever predicts for it."""

    predictor: PrefillPredictor
    learner: Learner | None = None
    share: Callable[[Sequence[Learner]], None] | None = None
    """Called each round with the others' learners."""


class Routers:
    """
    One router, or several that requests come to in turn and that tell each other once a round.

    First tokens and their tenants are heard by all at once, as they are in a mesh.

    Args:
        instances: Behind them.
        options: Of each.
        seats: One for each router.
        seed: Of their choices among candidates.
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
        self._told_at: UnixTime = 0.0
        self._turns = cycle(range(len(seats)))
        self._of: dict[RequestId, tuple[int, Assignment]] = {}
        """Whose each request is, until it has ended."""

    @property
    def is_fallen_back(self) -> bool:
        return any(router.is_fallen_back for router in self._routers)

    def submit(self, request: RoutedRequest, now: UnixTime) -> None:
        """To the router whose turn it is."""
        number = next(self._turns)
        self._of[request.request_id] = (number, self._routers[number].submit(request, now))

    def dispatch(self, now: UnixTime) -> Sequence[Assignment]:
        """Of all routers, which first hear of each other's work if it is time for that."""
        if len(self._seats) > 1 and now >= self._told_at + SHARE_S:
            self._tell_each_other(now)
        return [each for router in self._routers for each in router.dispatch(now)]

    def first_token(self, request: RoutedRequest, prefill_s: Seconds | None, now: UnixTime) -> None:
        """All count the tenant's; its own router learns, unless it was preempted."""
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

    def _tell_each_other(self, now: UnixTime) -> None:
        self._told_at = now
        told = [backlog.snapshot() for backlog in self._backlogs]
        for number, backlog in enumerate(self._backlogs):
            for other, state in enumerate(told):
                if other != number:
                    backlog.adopt(state, now)

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Its own router forgets it."""
        number, _ = self._of.pop(request_id)
        self._routers[number].finish(request_id, now)

    def report(self, loads: Mapping[InstanceId, InstanceLoad], now: UnixTime) -> None:
        """Everybody hears the instances, and what everybody else has learnt."""
        for router in self._routers:
            for instance_id, load in loads.items():
                router.observe(instance_id, load, now)
        for seat in self._seats:
            if seat.share is not None:
                others = (each.learner for each in self._seats if each is not seat)
                seat.share([each for each in others if each is not None])


class PulledQueue:
    """
    One queue, the nearest deadline first, that instances pull from while they have room.

    What agents do with the lanes of one model, but for the width of deadline bands; whoever holds
    least is first, as agents with work before them let others ask first.

    Args:
        instances: That pull.
        prefill_s: Predicted time of a prefill that finds nothing cached.
        bounds: Of what an instance takes ahead of time.
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
        """Predicted time of what was pulled and has no first token."""
        self._at: dict[RequestId, InstanceId] = {}

    def submit(self, request: RoutedRequest, now: UnixTime) -> None:
        """Nobody has it yet."""
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
        """One request at a time to whoever holds least, while that one has room."""
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
        """It is held no longer."""
        del prefill_s, now
        self._held[self._at[request.request_id]].pop(request.request_id, None)

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """It has gone."""
        del now
        self._held[self._at.pop(request_id)].pop(request_id, None)

    def report(self, loads: Mapping[InstanceId, InstanceLoad], now: UnixTime) -> None:
        """Each instance knows itself."""

    def _has_room(self, instance_id: InstanceId) -> bool:
        held = self._held[instance_id]
        if not held:
            return True
        return len(held) < self._bounds.window and sum(held.values()) < self._bounds.max_backlog_s
