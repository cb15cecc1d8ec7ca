"""Expected work ahead of a new request on an instance, in seconds (QUARTZ §3.3, §4.4)."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from msgspec.structs import replace

from shared.contracts.base import InstanceId, RequestId, Seconds, UnixTime
from shared.contracts.routing import InstanceLoad, SoftState, WorkTotals
from solver.routing.service_pace import ServicePace

T = TypeVar("T")

LOST_AFTER_S = 5.0
"""A missing first token counts as lost if its engine has had no prefill work for this long."""
OVERDUE_S = 60.0
"""
A first token that is missing for this long counts as lost, regardless of the engine's remaining
work. Less than a second of work is dispatched ahead of time, so the request must have left the
instance, as relegated requests do.
"""

_MOST_TOKENS = 1e9
"""Upper bound of the outstanding tokens, so that any published state gives a finite number."""

_ROUNDING_S = 1e-9
"""Rounding error of a difference of two totals, which are sums of many times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outstanding:
    """A request that was assigned to an instance and has no first token yet."""

    instance_id: InstanceId
    mean_s: Seconds


@dataclass(slots=True)
class _Instance:
    """Expected work, latest report and pace of one instance."""

    own: WorkTotals = field(default_factory=WorkTotals)
    others: WorkTotals = field(default_factory=WorkTotals)
    pace: ServicePace = field(default_factory=ServicePace)
    load: InstanceLoad = field(default_factory=InstanceLoad)
    dispatched: dict[RequestId, UnixTime] = field(default_factory=dict)
    """When each outstanding request was sent to the instance, in this order."""

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
        """Mean time until the engine has done its part of the expected work; at least 0."""
        count = self.num_outstanding
        if count <= 0:
            return 0.0
        typical_s = (self.in_engine_s + self.queued_s) / count
        return self.pace.wait_s(self.in_engine_s, typical_s, now)


class Backlog:
    """
    Work-based backlog of each instance, kept by one router and merged with other routers' states.

    The expected work of a request is added when the request is assigned and removed at its first
    token. Meanwhile it decays at the instance's recent pace. Reports of an instance correct the
    assumed work in its engine.

    Args:
        router: Name of this router, which no other router ever uses.

    Source: QUARTZ §4.4, B(w) and W(w). Only mean times are added up.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._others = SoftState()
        self._outstanding: dict[RequestId, _Outstanding] = {}
        self._instances: defaultdict[InstanceId, _Instance] = defaultdict(_Instance)
        self.version = 0
        """
        Version of this router's own totals, increased with each change; only this class writes it.
        """

    def assign(
        self,
        request_id: RequestId,
        instance_id: InstanceId,
        *,
        mean_s: Seconds,
        tokens: int,
        now: UnixTime,
    ) -> None:
        """
        Add a request assigned to *instance_id*, with *mean_s* of work and *tokens* to compute.
        """
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
        """Record that the request was sent to its instance; unknown requests are ignored."""
        request = self._outstanding.get(request_id)
        if request is None:
            return
        instance = self._instances[request.instance_id]
        if request_id in instance.dispatched:
            return
        instance.dispatched[request_id] = now
        dispatched_s = instance.own.dispatched_s + request.mean_s
        instance.own = replace(
            instance.own, version=self._next_version(), dispatched_s=dispatched_s
        )

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Record that the request has its first token; unknown requests are ignored."""
        request = self._end(request_id, now)
        if request is not None:
            self._instances[request.instance_id].pace.serve(request.mean_s, now)

    def give_up(self, request_id: RequestId, now: UnixTime) -> None:
        """
        Drop a request whose first token will not come, or will not be reported; ignore unknown
        requests.

        The pace of its instance does not change.
        """
        request = self._end(request_id, now)
        if request is not None:
            instance = self._instances[request.instance_id]
            given_up_s = instance.own.given_up_s + request.mean_s
            instance.own = replace(instance.own, given_up_s=given_up_s)

    def observe(self, instance_id: InstanceId, load: InstanceLoad, now: UnixTime) -> None:
        """Adopt a report of the instance; reports older than the latest are ignored."""
        instance = self._instances[instance_id]
        if load.seq <= instance.load.seq:
            return
        instance.load = load
        lost_after_s = OVERDUE_S if load.prefill_backlog_tokens else LOST_AFTER_S
        self._forget_lost(instance, before=load.at - lost_after_s, now=now)
        instance.pace.correct(instance.in_engine_s, load.prefill_backlog_tokens, now)

    def adopt(self, state: SoftState, now: UnixTime) -> None:
        """Merge the state of another router, without the totals of this router."""
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
        """Complete state of this router's totals and loads, which other routers adopt."""
        own = {i: each.own for i, each in self._instances.items() if each.own.version}
        loads = {i: each.load for i, each in self._instances.items() if each.load.seq}
        return replace(self._others, work={**self._others.work, self._router: own}, loads=loads)

    def load(self, instance_id: InstanceId) -> InstanceLoad:
        """The latest report of the instance; all values are 0 before the first report."""
        return self._instances[instance_id].load

    def outstanding_tokens(self, instance_id: InstanceId) -> int:
        """
        Prompt tokens that the instance has yet to compute, for assigned requests; at least 0.

        Source: QUARTZ table 2.
        Decided: a report is up to a second old, and does not include requests that wait in routers.
        So the result is the expected work of all routers, converted with the average time of a
        token. If the reported number is higher, the result is the reported number, because an
        instance also has requests that no router sent.
        """
        instance = self._instances[instance_id]
        work_s = instance.in_engine_s + instance.queued_s
        token_s = instance.pace.token_s
        expected = round(min(work_s / token_s, _MOST_TOKENS)) if token_s > 0 else 0
        return max(expected, instance.load.prefill_backlog_tokens)

    def num_outstanding(self, instance_id: InstanceId) -> int:
        """Number of requests of all known routers on the instance that have no first token yet."""
        return self._instances[instance_id].num_outstanding

    def is_idle(self, instance_id: InstanceId) -> bool:
        """True if every request that routers sent to the instance has its first token."""
        instance = self._instances[instance_id]
        return instance.in_engine_s <= _ROUNDING_S

    def forget(self, router: str) -> None:
        """Remove the totals of another router that has left."""
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
        """Mean time until the engine has done its part of the expected work; at least 0."""
        return self._instances[instance_id].engine_wait_s(now)

    def leave(self, instance_id: InstanceId) -> None:
        """
        Drop an instance without assigned requests; its totals may start again from 0.

        Other routers must have received the last change of the totals before. Otherwise they would
        count the last requests without limit.
        """
        self._instances.pop(instance_id, None)
        work = {
            router: {each: totals for each, totals in of.items() if each != instance_id}
            for router, of in self._others.work.items()
        }
        self._others = replace(self._others, work=work)

    def _next_version(self) -> int:
        """
        Increase and return the version, which never restarts, even if an instance is dropped and
        returns.
        """
        self.version += 1
        return self.version

    def _learn_pace(self, instance_id: InstanceId, grown_s: Seconds, now: UnixTime) -> None:
        """Learn the pace from *grown_s* of work served for other routers since their last state."""
        instance = self._instances[instance_id]
        if instance.num_outstanding <= 0:
            # As far as is known, the instance was idle and has begun to work since its last report.
            instance.pace.begin(now - grown_s)
        if grown_s > _ROUNDING_S:
            instance.pace.serve(grown_s, now)

    def _add_others(self, instance_id: InstanceId) -> None:
        """Recompute the sum of the totals of all other routers."""
        known = [work[instance_id] for work in self._others.work.values() if instance_id in work]
        self._instances[instance_id].others = WorkTotals(
            **{
                name: sum(getattr(totals, name) for totals in known)
                for name in WorkTotals.__struct_fields__
            }
        )

    def _forget_lost(self, instance: _Instance, *, before: UnixTime, now: UnixTime) -> None:
        oldest = takewhile(lambda item: item[1] < before, instance.dispatched.items())
        for request_id, _ in list(oldest):
            self.give_up(request_id, now)

    def _end(self, request_id: RequestId, now: UnixTime) -> _Outstanding | None:
        """Remove and return the outstanding request; None if it is unknown."""
        self.dispatch(request_id, now)
        request = self._outstanding.pop(request_id, None)
        if request is not None:
            instance = self._instances[request.instance_id]
            del instance.dispatched[request_id]
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
    Merge two states of routers: the result has the newest data of each.

    The merge is commutative, associative and idempotent, because equal versions have equal content:
    each router writes only its own totals, and each instance only its own load.
    """
    work = dict(one.work)
    for router, totals in other.work.items():
        work[router] = _newest(work.get(router, {}), totals, lambda each: each.version)
    loads = _newest(one.loads, other.loads, lambda each: each.seq)
    return replace(one, work=work, loads=loads)


def _newest(
    one: Mapping[InstanceId, T], other: Mapping[InstanceId, T], number: Callable[[T], int]
) -> dict[InstanceId, T]:
    """
    For each instance, the value with the higher *number*; if the numbers are equal, the first
    mapping's value.
    """
    newer = {
        instance_id: each
        for instance_id, each in other.items()
        if instance_id not in one or number(one[instance_id]) < number(each)
    }
    return {**one, **newer}


def served_between_s(instance_id: InstanceId, earlier: SoftState, later: SoftState) -> Seconds:
    """
    Work that an instance served between two states, for routers that are in both states.

    Work of a router that is in only one state is ignored, because its time of service is unknown.
    """
    grown_s = 0.0
    for router, work in later.work.items():
        before, after = earlier.work.get(router, {}).get(instance_id), work.get(instance_id)
        if before is not None and after is not None:
            grown_s += after.finished_s - after.given_up_s - before.finished_s + before.given_up_s
    return grown_s
