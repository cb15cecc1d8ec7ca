"""The planner's state in memory; all of it can be rebuilt from messages and queue counts."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cachetools import FIFOCache

from services.planner.lane_totals import LaneCounter
from services.planner.leader.idle_times import IdleTimes
from services.planner.leader.plan_history import PlanRecord
from shared.contracts.base import (
    InstanceId,
    RequestId,
    Seconds,
    TenantId,
    UnixTime,
)
from shared.contracts.estimates import Profile
from shared.contracts.lanes import is_inbox
from shared.contracts.plans import (
    AdvisedInstances,
    LaneForecast,
    LanesForecast,
    PlanPublished,
)
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest, WaitForecast
from shared.contracts.telemetry import InboxUsed, InstanceStatus, LanesObserved
from shared.runtime.metrics import BoundedCounts
from solver.planning.forecast import forecast_now
from solver.planning.problem.grouping import GroupId
from solver.planning.problem.queue_counts import QueueCounts, QueueTotal
from solver.routing.shares import TenantShares

FORECAST_MEMORY_S = 10.0
"""Age above which a forecast is not used."""
INBOX_MEMORY_S = 3600.0
"""
Time for which a grouper continues to report an inbox that it used.

A leader that was absent for up to this time still receives the report.
"""


@dataclass(slots=True, kw_only=True)
class GrouperState:
    """State of one grouper in memory."""

    shares: TenantShares
    recent: FIFOCache[str, None]
    """Ids of the requests that were put into lanes last."""
    lanes: dict[str, LaneCounter] = field(default_factory=dict)
    outstanding: dict[str, UnixTime] = field(default_factory=dict)
    """Key of each request that counts in its tenant's share -> time of admission, oldest first."""
    admitted: int = 0
    refused: int = 0
    held: int = 0
    """Requests that were put into delay queues, once each."""
    expired: Counter[str] = field(default_factory=Counter)
    """Place -> number of requests that this grouper has ended at their ends."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Work queue -> number of requests that the broker has dropped from it at their ends."""
    limited: int = 0
    """Number of refused requests above a limit of their tenant."""
    dead_letters: Counter[str] = field(default_factory=Counter)
    """Reason, one of `DEAD_LETTER_REASONS` -> number of dead letters that this grouper has read."""
    violated: Counter[str] = field(default_factory=Counter)
    """QoS class -> number of requests that this grouper has ended without an answer."""
    violated_by_tenant: BoundedCounts = field(default_factory=BoundedCounts)
    """`violated` by tenant and QoS class."""
    seq: int = 0
    forecasts: dict[str, LaneForecast] = field(default_factory=dict)
    """Forecast of each lane from the leader, for the time `counted_at`."""
    routed_at: dict[InstanceId, UnixTime] = field(default_factory=dict)
    """Instance -> time at which a request was last sent to its inbox; kept for `INBOX_MEMORY_S`."""
    entering: dict[str, int] = field(default_factory=dict)
    """Lane -> number of requests whose publish to the lane is in progress."""
    num_groupers: int = 1
    counted_at: UnixTime = -math.inf
    heard_at: UnixTime = -math.inf
    """Time at which the leader's last forecasts arrived."""

    def on_forecast(self, forecast: LanesForecast, now: UnixTime) -> None:
        """Store the leader's forecasts of lanes."""
        self.forecasts = {each.lane: each for each in forecast.lanes}
        self.num_groupers = forecast.groupers
        self.counted_at, self.heard_at = now - forecast.age_s, now

    def forecast(self, lane: str, now: UnixTime) -> LaneForecast | None:
        """Current forecast of *lane*; None if there is no forecast or the forecast is too old."""
        forecast = self.forecasts.get(lane)
        if forecast is None or now - self.heard_at > FORECAST_MEMORY_S:
            return None
        counter, entering = self.lanes.get(lane), self.entering.get(lane, 0)
        arrivals = counter.recent.after(self.counted_at) if counter else []
        came = [(now - at, float(self.num_groupers * (num + entering))) for at, num in arrivals]
        if entering:
            came.append((0.0, float(self.num_groupers * entering)))
        return forecast_now(forecast, age_s=max(0.0, now - self.counted_at), came=came)

    def wait_forecast(self, request: QueuedRequest, now: UnixTime) -> WaitForecast | None:
        """
        Forecast of *request*'s wait since `grouped_at`; None if its lane's forecast has no wait.
        """
        forecast = self.forecast(request.lane, now)
        if forecast is None or forecast.wait_s is None or forecast.wait_sd_s is None:
            return None
        waited_s = max(0.0, now - request.grouped_at)
        return WaitForecast(mean_s=waited_s + forecast.wait_s, sd_s=forecast.wait_sd_s)

    def missed(self, qos_class: QosClass, tenant: TenantId) -> None:
        """Count a request that this grouper has ended without an answer."""
        self.violated[qos_class.value] += 1
        self.violated_by_tenant.add(tenant, qos_class.value)

    @contextmanager
    def entry(self, lane: str) -> Iterator[None]:
        """
        Context in which a request is published to *lane*.

        In this context the request counts as entering the lane, until `count` counts it in the
        lane.
        """
        self.entering[lane] = self.entering.get(lane, 0) + 1
        try:
            yield
        finally:
            self.entering[lane] -= 1
            if not self.entering[lane]:
                del self.entering[lane]

    def count(self, request: QueuedRequest, *, queue: str, at: UnixTime) -> None:
        """
        Count *request*, which was published to *queue*: a lane, an overflow queue or an inbox.
        """
        self.admitted += 1
        counter = self.lanes.setdefault(request.lane, LaneCounter())
        counter.add(request, at=at)
        if queue == request.lane:
            counter.recent.add(at)
        elif is_inbox(queue):
            counter.routed += 1

    def inboxes_used(self, now: UnixTime) -> tuple[InboxUsed, ...]:
        """`routed_at` in the form of a report, with entries no older than `INBOX_MEMORY_S`."""
        self.routed_at = {
            name: at for name, at in self.routed_at.items() if now - at < INBOX_MEMORY_S
        }
        return tuple(
            InboxUsed(instance_id=name, idle_s=max(0.0, now - at))
            for name, at in self.routed_at.items()
        )

    def admit(self, request_id: RequestId, tenant: TenantId, tokens: int, *, at: UnixTime) -> bool:
        """
        Add an admitted request to its tenant's share; return False if the request already counts.
        """
        key = identity(tenant, request_id)
        if key in self.outstanding:
            return False
        self.outstanding[key] = at
        self.shares.admit(key, tenant, tokens)
        return True

    def finish(self, request_id: RequestId, tenant: TenantId) -> None:
        """Remove a finished request from its tenant's share; unknown requests are ignored."""
        key = identity(tenant, request_id)
        self.outstanding.pop(key, None)
        self.shares.finish(key)

    def expire_outstanding(self, before: UnixTime) -> None:
        """
        Remove requests that were admitted before *before*, since messages about their ends may be
        lost.
        """
        while self.outstanding:
            key, at = next(iter(self.outstanding.items()))
            if at >= before:
                break
            del self.outstanding[key]
            self.shares.finish(key)


def identity(tenant: TenantId, request_id: RequestId) -> str:
    """Unique key of a request, since ids are unique only within one tenant."""
    return f"{tenant}\0{request_id}"


@dataclass(slots=True, kw_only=True)
class LeaderState:
    """The leader's view of the cluster."""

    active_since: UnixTime | None = None
    """
    Time at which this process became the active leader; None while it is not the active leader.
    """
    epoch: int = 0
    instances: dict[str, InstanceStatus] = field(default_factory=dict)
    seen_at: dict[str, UnixTime] = field(default_factory=dict)
    model_since: dict[str, tuple[str | None, UnixTime]] = field(default_factory=dict)
    lanes: dict[tuple[str, str], LanesObserved] = field(default_factory=dict)
    """Last lane totals of each grouper, by (sender, incarnation)."""
    counts: QueueCounts = field(default_factory=QueueCounts)
    waiting: dict[str, int] = field(default_factory=dict)
    """Queue -> number of requests that wait in the queue, as of the current planning round."""
    unserved_s: dict[str, Seconds] = field(default_factory=dict)
    """Queue with waiting requests -> time since a request left it; as of the current round."""
    deadline_s: dict[str, Seconds] = field(default_factory=dict)
    """Queue in `unserved_s` -> longest time to the deadlines of its requests, if it has a bound."""
    profiles: dict[tuple[str, str, str], Profile] = field(default_factory=dict)
    plans: dict[str, PlanPublished] = field(default_factory=dict)
    places: Mapping[GroupId, tuple[InstanceId, int]] = field(default_factory=dict)
    """Instance and position of each request group in the plan in force."""
    record: PlanRecord = field(default_factory=PlanRecord)
    idle: IdleTimes = field(default_factory=IdleTimes)
    advice: tuple[AdvisedInstances, ...] = ()
    """Advised numbers of instances, of all known devices; empty before the first advice."""
    alarms_heard: int = 0
    alarms_planned: int = 0
    """Number of received alarms that planning rounds have already considered."""
    worker_restarts: int = 0

    @property
    def leads(self) -> bool:
        return self.active_since is not None

    def copied(self) -> "LeaderState":
        """
        A copy of the inputs of a snapshot, since messages may change the original while the
        snapshot is made.
        """
        return replace(
            self,
            instances=dict(self.instances),
            model_since=dict(self.model_since),
            lanes=dict(self.lanes),
            waiting=dict(self.waiting),
            profiles=dict(self.profiles),
        )

    def on_status(self, status: InstanceStatus, now: UnixTime) -> None:
        """Store an instance's status, unless a newer status of the same incarnation is stored."""
        known = self.instances.get(status.instance_id)
        if known and known.incarnation == status.incarnation and known.seq >= status.seq:
            return
        if known is None or known.next_model != status.next_model:
            self.model_since[status.instance_id] = (status.next_model, now)
        self.instances[status.instance_id] = status
        self.seen_at[status.instance_id] = now
        self.epoch = max(self.epoch, status.plan_epoch)
        totals = {
            queue: QueueTotal(status.put.get(queue, 0), status.pulled_by_lane.get(queue, 0))
            for queue in status.put.keys() | status.pulled_by_lane.keys()
            if not is_inbox(queue)
        }
        self.counts.observe(status.source, totals, now)
        if known and known.incarnation != status.incarnation:
            self.counts.forget(known.source)
        elif known and status.totals.connections_lost != known.totals.connections_lost:
            self.counts.suspect(status.source)

    def on_lanes(self, observed: LanesObserved, now: UnixTime) -> None:
        """Store the lane totals of a grouper."""
        self.lanes[observed.sender, observed.incarnation] = observed
        totals = {
            queue: QueueTotal(observed.put.get(queue, 0), observed.expired.get(queue, 0))
            for queue in observed.put.keys() | observed.expired.keys()
        }
        self.counts.observe(observed.source, totals, now)

    def on_profile(self, profile: Profile) -> None:
        """Store a profile, unless a higher version of the profile is stored."""
        key = (profile.model, profile.engine, profile.device)
        known = self.profiles.get(key)
        if known is None or profile.version >= known.version:
            self.profiles[key] = profile

    def count_groupers(self, since: UnixTime) -> int:
        """Number of groupers that have reported since *since*; at least 1."""
        return max(1, sum(observed.at >= since for observed in self.lanes.values()))

    def forget_groupers(self, before: UnixTime) -> None:
        """Drop the lane totals of groupers that have been silent since *before*."""
        for sender, observed in tuple(self.lanes.items()):
            if observed.at < before:
                del self.lanes[sender]
                self.counts.forget(observed.source)

    def excuse(self, missed_s: Seconds) -> None:
        """
        Extend the timeouts of peers by *missed_s*, a time in which this process could not receive.
        """
        if missed_s:
            self.seen_at = {name: at + missed_s for name, at in self.seen_at.items()}

    def forget_silent(self, before: UnixTime) -> list[str]:
        """Drop instances that have sent no status since *before*; return these instances."""
        silent = [name for name, at in self.seen_at.items() if at < before]
        for name in silent:
            if (status := self.instances.get(name)) is not None:
                self.counts.forget(status.source)
            for table in (self.instances, self.seen_at, self.model_since, self.plans):
                table.pop(name, None)
        return silent
