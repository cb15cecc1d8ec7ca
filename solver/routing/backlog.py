"""Expected work before an instance, in seconds (QUARTZ §3.3, §4.4)."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from shared.contracts.base import InstanceId, RequestId, Seconds, UnixTime
from shared.contracts.routing import InstanceLoad, SoftState, WorkTotals
from solver.routing.service_pace import ServicePace

T = TypeVar("T")

LOST_AFTER_S = 5.0
"""A first token is lost if its engine has had nothing to prefill for this long."""
OVERDUE_S = 60.0
"""
Regardless of the engine's remaining work: less than a second of work is sent ahead of time, so a
request without a first token for this long went elsewhere, as relegated requests do.
"""

_MOST_TOKENS = 1e9
"""Upper bound of tokens before an instance, so that any published state gives a finite number."""

_ROUNDING_S = 1e-9
"""Rounding error of differences of totals, each the sum of many times."""


@dataclass(slots=True, kw_only=True)
class _Outstanding:
    """A request without a first token."""

    instance_id: InstanceId
    mean_s: Seconds
    dispatched_at: UnixTime | None = None


@dataclass(slots=True)
class _Instance:
    """State of one instance."""

    own: WorkTotals = field(default_factory=WorkTotals)
    others: WorkTotals = field(default_factory=WorkTotals)
    pace: ServicePace = field(default_factory=ServicePace)
    load: InstanceLoad = field(default_factory=InstanceLoad)

    @property
    def num_outstanding(self) -> int:
        own, others = self.own, self.others
        return own.num_assigned - own.num_finished + others.num_assigned - others.num_finished

    @property
    def in_engine_s(self) -> Seconds:
        own, others = self.own, self.others
        expected_s = own.dispatched_s - own.finished_s + others.dispatched_s - others.finished_s
        return max(0.0, expected_s)

    @property
    def queued_s(self) -> Seconds:
        own, others = self.own, self.others
        expected_s = own.assigned_s - own.dispatched_s + others.assigned_s - others.dispatched_s
        return max(0.0, expected_s)

    def engine_wait_s(self, now: UnixTime) -> Seconds:
        """As `Backlog.engine_wait_s`."""
        count = self.num_outstanding
        if count <= 0:
            return 0.0
        typical_s = (self.in_engine_s + self.queued_s) / count
        return self.pace.wait_s(self.in_engine_s, typical_s, now)


class Backlog:
    """
    Work-based backlog of each instance, by one router, merged with the state of other routers.

    Expected work is added when a request is assigned and removed at its first token. In between
    it decays at the instance's recent pace. An instance's reports correct the assumed work in its
    engine.

    Args:
        router: Name of the router, never used by another one.

    Source: QUARTZ §4.4, B(w) and W(w); only means are added up.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._others = SoftState()
        self._outstanding: dict[RequestId, _Outstanding] = {}
        self._instances: defaultdict[InstanceId, _Instance] = defaultdict(_Instance)
        self.version = 0
        """Version of all own totals: increases with each change; only this class writes it."""

    def assign(
        self,
        request_id: RequestId,
        instance_id: InstanceId,
        *,
        mean_s: Seconds,
        tokens: int,
        now: UnixTime,
    ) -> None:
        """Add a request that *instance_id* will serve: *mean_s* of work, *tokens* to compute."""
        instance = self._instances[instance_id]
        if instance.num_outstanding <= 0:
            instance.pace.begin(now)
        instance.pace.add(mean_s, tokens)
        self._outstanding[request_id] = _Outstanding(instance_id=instance_id, mean_s=mean_s)
        own = instance.own
        instance.own = replace(
            own,
            version=self._next_version(),
            assigned_s=own.assigned_s + mean_s,
            num_assigned=own.num_assigned + 1,
        )

    def dispatch(self, request_id: RequestId, now: UnixTime) -> None:
        """Record that the request was sent to its instance; unknown ones are ignored."""
        request = self._outstanding.get(request_id)
        if request is None or request.dispatched_at is not None:
            return
        request.dispatched_at = now
        instance = self._instances[request.instance_id]
        dispatched_s = instance.own.dispatched_s + request.mean_s
        instance.own = replace(
            instance.own, version=self._next_version(), dispatched_s=dispatched_s
        )

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Record that the request has its first token; unknown ones are ignored."""
        request = self._end(request_id, now)
        if request is not None:
            self._instances[request.instance_id].pace.serve(request.mean_s, now)

    def give_up(self, request_id: RequestId, now: UnixTime) -> None:
        """
        Drop a request whose first token will not come or not be known; unknown ones are ignored.

        The pace of its instance does not change.
        """
        request = self._end(request_id, now)
        if request is not None:
            instance = self._instances[request.instance_id]
            given_up_s = instance.own.given_up_s + request.mean_s
            instance.own = replace(instance.own, given_up_s=given_up_s)

    def observe(self, instance_id: InstanceId, load: InstanceLoad, now: UnixTime) -> None:
        """Adopt a report of the instance; older ones than the latest are ignored."""
        instance = self._instances[instance_id]
        if load.seq <= instance.load.seq:
            return
        instance.load = load
        lost_after_s = OVERDUE_S if load.prefill_backlog_tokens else LOST_AFTER_S
        self._forget_lost(instance_id, before=load.at - lost_after_s, now=now)
        instance.pace.correct(instance.in_engine_s, load.prefill_backlog_tokens, now)

    def adopt(self, state: SoftState, now: UnixTime) -> None:
        """Merge the state of another router; its data on this router are ignored."""
        others = {router: work for router, work in state.work.items() if router != self._router}
        known = self._others
        self._others = merged(known, SoftState(work=others))
        for instance_id in {each for work in others.values() for each in work}:
            grown_s = served_between_s(instance_id, known, self._others)
            self._learn_pace(instance_id, grown_s, now)
            self._add_others(instance_id)
        for instance_id, load in state.loads.items():
            self.observe(instance_id, load, now)

    def snapshot(self) -> SoftState:
        """The complete state, for other routers to adopt."""
        own = {i: each.own for i, each in self._instances.items() if each.own.version}
        loads = {i: each.load for i, each in self._instances.items() if each.load.seq}
        return replace(self._others, work={**self._others.work, self._router: own}, loads=loads)

    def load(self, instance_id: InstanceId) -> InstanceLoad:
        """The latest report; all zero before the first."""
        return self._instances[instance_id].load

    def outstanding_tokens(self, instance_id: InstanceId) -> int:
        """
        Prompt tokens there, assigned or waiting, that are not computed yet; at least 0.

        Source: QUARTZ table 2.
        Decided: a report is up to a second old, and does not include requests that wait here. So
        this
        is the expected work of all routers, in tokens of its own average, or the reported number if
        that is higher: the instance also has requests that no router sent.
        """
        instance = self._instances[instance_id]
        work_s = instance.in_engine_s + instance.queued_s
        token_s = instance.pace.token_s
        expected = round(min(work_s / token_s, _MOST_TOKENS)) if token_s > 0 else 0
        return max(expected, instance.load.prefill_backlog_tokens)

    def num_outstanding(self, instance_id: InstanceId) -> int:
        """Requests without a first token, of all known routers."""
        return self._instances[instance_id].num_outstanding

    def is_idle(self, instance_id: InstanceId) -> bool:
        """True if every request that routers sent to the instance has its first token."""
        instance = self._instances[instance_id]
        return instance.in_engine_s <= _ROUNDING_S

    def forget(self, router: str) -> None:
        """Remove the totals of another router that is gone."""
        work = {name: each for name, each in self._others.work.items() if name != router}
        left = self._others.work.get(router, {})
        self._others = replace(self._others, work=work)
        for instance_id in left:
            self._add_others(instance_id)

    def expected_wait_s(self, instance_id: InstanceId, now: UnixTime) -> Seconds:
        """Mean time until the instance could begin one more request; at least 0."""
        instance = self._instances[instance_id]
        return instance.queued_s / instance.pace.value + instance.engine_wait_s(now)

    def engine_wait_s(self, instance_id: InstanceId, now: UnixTime) -> Seconds:
        """Time for the part of the wait that the engine already holds; at least 0."""
        return self._instances[instance_id].engine_wait_s(now)

    def leave(self, instance_id: InstanceId) -> None:
        """
        Drop an instance to which nothing is assigned; its totals may start again from 0.

        Other routers must have received the last change, or they count unfinished requests
        endlessly.
        """
        self._instances.pop(instance_id, None)
        work = {
            router: {each: totals for each, totals in of.items() if each != instance_id}
            for router, of in self._others.work.items()
        }
        self._others = replace(self._others, work=work)

    def _next_version(self) -> int:
        """Versions continue for an instance that comes back."""
        self.version += 1
        return self.version

    def _learn_pace(self, instance_id: InstanceId, grown_s: Seconds, now: UnixTime) -> None:
        """Learn from *grown_s* of work served for other routers since their last state."""
        instance = self._instances[instance_id]
        if instance.num_outstanding <= 0:
            # The instance was idle as far as is known, and has begun since.
            instance.pace.begin(now - grown_s)
        if grown_s > _ROUNDING_S:
            instance.pace.serve(grown_s, now)

    def _add_others(self, instance_id: InstanceId) -> None:
        """Recompute the sum of the other routers' totals."""
        known = [work[instance_id] for work in self._others.work.values() if instance_id in work]
        self._instances[instance_id].others = WorkTotals(
            **{
                name: sum(getattr(totals, name) for totals in known)
                for name in WorkTotals.__struct_fields__
            }
        )

    def _forget_lost(self, instance_id: InstanceId, *, before: UnixTime, now: UnixTime) -> None:
        for request_id, request in list(self._outstanding.items()):
            at = request.dispatched_at
            if request.instance_id == instance_id and at is not None and at < before:
                self.give_up(request_id, now)

    def _end(self, request_id: RequestId, now: UnixTime) -> _Outstanding | None:
        """Remove and return the request; None if it was not expected."""
        self.dispatch(request_id, now)
        request = self._outstanding.pop(request_id, None)
        if request is not None:
            instance = self._instances[request.instance_id]
            own = instance.own
            instance.own = replace(
                own,
                version=self._next_version(),
                finished_s=own.finished_s + request.mean_s,
                num_finished=own.num_finished + 1,
            )
        return request


def merged(one: SoftState, other: SoftState) -> SoftState:
    """
    The newest data of both states.

    Commutative, associative and idempotent if equal versions have equal content. This holds
    because only a router writes its own totals and only an instance its own load.
    """
    work = dict(one.work)
    for router, totals in other.work.items():
        work[router] = _newest(work.get(router, {}), totals, lambda each: each.version)
    loads = _newest(one.loads, other.loads, lambda each: each.seq)
    return replace(one, work=work, loads=loads)


def _newest(
    one: Mapping[InstanceId, T], other: Mapping[InstanceId, T], number: Callable[[T], int]
) -> dict[InstanceId, T]:
    """For each instance, the value with the higher *number*; of equal ones the first."""
    newer = {
        instance_id: each
        for instance_id, each in other.items()
        if instance_id not in one or number(one[instance_id]) < number(each)
    }
    return {**one, **newer}


def served_between_s(instance_id: InstanceId, known: SoftState, heard: SoftState) -> Seconds:
    """
    Work that an instance served between two states, for routers that are in both states.

    Work of a router that is new, or was forgotten in between, has no known time of service.
    """
    grown_s = 0.0
    for router, work in heard.work.items():
        before, after = known.work.get(router, {}).get(instance_id), work.get(instance_id)
        if before is not None and after is not None:
            grown_s += after.finished_s - after.given_up_s - before.finished_s + before.given_up_s
    return grown_s
