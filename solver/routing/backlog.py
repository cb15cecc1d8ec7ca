"""Expected work before an instance, in seconds (QUARTZ §3.3, §4.4)."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from shared.contracts.base import InstanceId, RequestId, Seconds, UnixTime
from shared.contracts.routing import InstanceLoad, SoftState
from solver.routing.service_pace import ServicePace
from solver.routing.soft_state import merged
from solver.routing.work import Work, served_between_s

LOST_AFTER_S = 5.0
"""A first token whose engine has had nothing left to prefill for so long was lost on its way."""
OVERDUE_S = 60.0
"""Whatever its engine has left: of less than a second of work that is sent ahead of time, what has
no first token for so long went elsewhere, as relegated requests do."""

_MOST_TOKENS = 1e9
"""Before an instance: whatever others tell, a number."""

_ROUNDING_S = 1e-9
"""Of differences of totals, each the sum of many times."""


@dataclass(slots=True, kw_only=True)
class _Outstanding:
    """A request without a first token."""

    instance_id: InstanceId
    mean_s: Seconds
    dispatched_at: UnixTime | None = None


@dataclass(slots=True)
class _Instance:
    """What is known of one instance."""

    own: Work = field(default_factory=Work)
    others: Work = field(default_factory=Work)
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
        """As of `Backlog`."""
        count = self.num_outstanding
        if count <= 0:
            return 0.0
        typical_s = (self.in_engine_s + self.queued_s) / count
        return self.pace.wait_s(self.in_engine_s, typical_s, now)


class Backlog:
    """
    Work-based backlog of each instance, by one router, with what others told it.

    Expected work is added when a request is assigned and taken off at its first token. In between
    it decays at the pace of the instance's latest service. An instance's reports correct what its
    engine is thought to hold.

    Args:
        router: Name of the router, never used by another one.

    Source: QUARTZ §4.4, B(w) and W(w); only means are added up.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._others = SoftState()
        self._outstanding: dict[RequestId, _Outstanding] = {}
        self._instances: dict[InstanceId, _Instance] = {}
        self.version = 0
        """Of all own totals: rises with each change; only this class writes it."""

    def assign(
        self,
        request_id: RequestId,
        instance_id: InstanceId,
        *,
        mean_s: Seconds,
        tokens: int,
        now: UnixTime,
    ) -> None:
        """A request is to be served by *instance_id*: *mean_s* of work, *tokens* to compute."""
        instance = self._instance(instance_id)
        if instance.num_outstanding <= 0:
            instance.pace.begin(now)
        instance.pace.add(mean_s, tokens)
        self._outstanding[request_id] = _Outstanding(instance_id=instance_id, mean_s=mean_s)
        self._change(instance.own)
        instance.own.assigned_s += mean_s
        instance.own.num_assigned += 1

    def dispatch(self, request_id: RequestId, now: UnixTime) -> None:
        """The request has been sent to its instance; unknown ones are ignored."""
        request = self._outstanding.get(request_id)
        if request is None or request.dispatched_at is not None:
            return
        request.dispatched_at = now
        own = self._instance(request.instance_id).own
        self._change(own)
        own.dispatched_s += request.mean_s

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """The request has its first token; unknown ones are ignored."""
        request = self._end(request_id, now)
        if request is not None:
            self._instance(request.instance_id).pace.serve(request.mean_s, now)

    def give_up(self, request_id: RequestId, now: UnixTime) -> None:
        """
        The request gets no first token there, or none that is heard of; unknown ones are ignored.

        It says nothing of how fast its instance is.
        """
        request = self._end(request_id, now)
        if request is not None:
            self._instance(request.instance_id).own.given_up_s += request.mean_s

    def observe(self, instance_id: InstanceId, load: InstanceLoad, now: UnixTime) -> None:
        """A report of the instance; older ones than the latest are ignored."""
        instance = self._instance(instance_id)
        if load.seq <= instance.load.seq:
            return
        instance.load = load
        lost_after_s = OVERDUE_S if load.prefill_backlog_tokens else LOST_AFTER_S
        self._forget_lost(instance_id, before=load.at - lost_after_s, now=now)
        instance.pace.correct(instance.in_engine_s, load.prefill_backlog_tokens, now)

    def adopt(self, state: SoftState, now: UnixTime) -> None:
        """What another router knows; what it tells of this one changes nothing."""
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
        """Everything that is known, for others to adopt."""
        own = {
            instance_id: each.own.told()
            for instance_id, each in self._instances.items()
            if each.own.version
        }
        loads = {i: each.load for i, each in self._instances.items() if each.load.seq}
        return replace(self._others, work={**self._others.work, self._router: own}, loads=loads)

    def load(self, instance_id: InstanceId) -> InstanceLoad:
        """The latest report; all zero before the first."""
        return self._instance(instance_id).load

    def outstanding_tokens(self, instance_id: InstanceId) -> int:
        """
        Prompt tokens there, assigned or waiting, that are not computed yet; at least 0.

        Source: QUARTZ table 2.
        Decided: a report is up to a second old, and knows nothing of what waits here. So it is
        the expected work of all routers, in tokens of its own average, or what was reported if
        that is more: the instance also has requests that no router sent.
        """
        instance = self._instance(instance_id)
        work_s = instance.in_engine_s + instance.queued_s
        token_s = instance.pace.token_s
        expected = round(min(work_s / token_s, _MOST_TOKENS)) if token_s > 0 else 0
        return max(expected, instance.load.prefill_backlog_tokens)

    def num_outstanding(self, instance_id: InstanceId) -> int:
        """Requests without a first token, of all known routers."""
        return self._instance(instance_id).num_outstanding

    def is_idle(self, instance_id: InstanceId) -> bool:
        """Whether no router has sent it anything that has no first token yet."""
        instance = self._instance(instance_id)
        return instance.in_engine_s <= _ROUNDING_S

    def forget(self, router: str) -> None:
        """Another router is gone: what it had sent counts no longer."""
        work = {name: each for name, each in self._others.work.items() if name != router}
        left = self._others.work.get(router, {})
        self._others = replace(self._others, work=work)
        for instance_id in left:
            self._add_others(instance_id)

    def expected_wait_s(self, instance_id: InstanceId, now: UnixTime) -> Seconds:
        """Mean time until the instance could begin one more request; at least 0."""
        instance = self._instance(instance_id)
        return instance.queued_s / instance.pace.value + instance.engine_wait_s(now)

    def engine_wait_s(self, instance_id: InstanceId, now: UnixTime) -> Seconds:
        """The part of the wait that the engine has been given already; at least 0."""
        return self._instance(instance_id).engine_wait_s(now)

    def leave(self, instance_id: InstanceId) -> None:
        """
        Keep nothing of an instance to which nothing is assigned; totals of it may begin anew.

        Others must have heard the last change, or they count for ever what they did not hear end.
        """
        self._instances.pop(instance_id, None)
        work = {
            router: {each: totals for each, totals in of.items() if each != instance_id}
            for router, of in self._others.work.items()
        }
        self._others = replace(self._others, work=work)

    def _change(self, own: Work) -> None:
        """Versions of an instance that comes back go on where they were."""
        self.version += 1
        own.version = self.version

    def _learn_pace(self, instance_id: InstanceId, grown_s: Seconds, now: UnixTime) -> None:
        """Others saw so much served since they were heard last."""
        instance = self._instance(instance_id)
        if instance.num_outstanding <= 0:
            # It was idle as far as was known, and has begun since.
            instance.pace.begin(now - grown_s)
        if grown_s > _ROUNDING_S:
            instance.pace.serve(grown_s, now)

    def _add_others(self, instance_id: InstanceId) -> None:
        """Others' totals anew."""
        others = Work()
        for work in self._others.work.values():
            if instance_id in work:
                others.add(work[instance_id])
        self._instance(instance_id).others = others

    def _forget_lost(self, instance_id: InstanceId, *, before: UnixTime, now: UnixTime) -> None:
        for request_id, request in list(self._outstanding.items()):
            at = request.dispatched_at
            if request.instance_id == instance_id and at is not None and at < before:
                self.give_up(request_id, now)

    def _end(self, request_id: RequestId, now: UnixTime) -> _Outstanding | None:
        """Expect the request no longer; what was expected, if anything was."""
        self.dispatch(request_id, now)
        request = self._outstanding.pop(request_id, None)
        if request is not None:
            own = self._instance(request.instance_id).own
            self._change(own)
            own.finished_s += request.mean_s
            own.num_finished += 1
        return request

    def _instance(self, instance_id: InstanceId) -> _Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            instance = self._instances[instance_id] = _Instance()
        return instance
