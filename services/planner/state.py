"""What the planner remembers. Soft: all of it can be rebuilt from messages and counts."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from services.planner.lane_counter import LaneCounter
from services.planner.record import PlanRecord
from shared.contracts.base import (
    InstanceId,
    ModelName,
    RequestId,
    Seconds,
    TenantId,
    UnixTime,
)
from shared.contracts.estimates import Profile
from shared.contracts.lanes import is_inbox, work_version_of
from shared.contracts.plans import (
    AdvisedInstances,
    LaneForecast,
    LanesForecast,
    PlanPublished,
)
from shared.contracts.requests import QueuedRequest, WaitForecast
from shared.contracts.telemetry import InstanceStatus, LanesObserved, WorkTotal
from solver.planning.forecast import forecast_now
from solver.planning.grouping import GroupId
from solver.planning.lanes import is_bygone
from solver.planning.work_classes import bin_of
from solver.routing.shares import TenantShares

FORECAST_MEMORY_S = 10.0
"""Older forecasts say nothing about now."""


@dataclass(slots=True)
class RecentIds:
    """The last request ids that went into lanes."""

    capacity: int
    _ids: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """Remember one more, forgetting the oldest."""
        self._ids[request_id] = None
        while len(self._ids) > self.capacity:
            self._ids.popitem(last=False)


@dataclass(slots=True, kw_only=True)
class GrouperState:
    """One grouper's."""

    shares: TenantShares
    recent: RecentIds
    lanes: dict[str, LaneCounter] = field(default_factory=dict)
    work: dict[ModelName, dict[int, int]] = field(default_factory=dict)
    """Requests by bin of their work, of each model."""
    declared: set[str] = field(default_factory=set)
    outstanding: dict[str, UnixTime] = field(default_factory=dict)
    """Requests that count in the shares, and since when; the oldest first."""
    admitted: int = 0
    refused: int = 0
    seq: int = 0
    forecasts: dict[str, LaneForecast] = field(default_factory=dict)
    """Of the leader, by lane, of `counted_at`."""
    entering: dict[str, int] = field(default_factory=dict)
    """Requests that are on their way into each lane; see `entry`."""
    num_groupers: int = 1
    counted_at: UnixTime = -math.inf
    heard_at: UnixTime = -math.inf
    """When forecasts came last."""

    def on_forecast(self, forecast: LanesForecast, now: UnixTime) -> None:
        """Take in what the leader expects of lanes."""
        self.forecasts = {each.lane: each for each in forecast.lanes}
        self.num_groupers = forecast.groupers
        self.counted_at, self.heard_at = now - forecast.age_s, now

    def forecast(self, lane: str, now: UnixTime) -> LaneForecast | None:
        """What is expected of *lane* by now; None when that is not known, or long ago."""
        told = self.forecasts.get(lane)
        if told is None or now - self.heard_at > FORECAST_MEMORY_S:
            return None
        counter, entering = self.lanes.get(lane), self.entering.get(lane, 0)
        arrivals = counter.recent.after(self.counted_at) if counter else []
        came = [(now - at, float(self.num_groupers * (num + entering))) for at, num in arrivals]
        if entering:
            came.append((0.0, float(self.num_groupers * entering)))
        return forecast_now(told, age_s=max(0.0, now - self.counted_at), came=came)

    def wait_forecast(self, request: QueuedRequest, now: UnixTime) -> WaitForecast | None:
        """How long *request* waits from `grouped_at` on; None where `forecast` has no wait."""
        told = self.forecast(request.lane, now)
        if told is None or told.wait_s is None or told.wait_sd_s is None:
            return None
        waited_s = max(0.0, now - request.grouped_at)
        return WaitForecast(mean_s=waited_s + told.wait_s, sd_s=told.wait_sd_s)

    @contextmanager
    def entry(self, lane: str) -> Iterator[None]:
        """A request is being published to *lane*: it counts there until `count` is called."""
        self.entering[lane] = self.entering.get(lane, 0) + 1
        try:
            yield
        finally:
            self.entering[lane] -= 1
            if not self.entering[lane]:
                del self.entering[lane]

    def count(self, request: QueuedRequest, *, queue: str, work_tokens: int, at: UnixTime) -> None:
        """*request*, of so much work, went into *queue*: its lane, or what stands for it."""
        self.admitted += 1
        counter = self.lanes.setdefault(request.lane, LaneCounter())
        counter.add(request, at=at)
        if queue == request.lane:
            counter.recent.add(at)
        elif is_inbox(queue):
            counter.routed += 1
        bins = self.work.setdefault(request.model.base, {})
        number = bin_of(work_tokens)
        bins[number] = bins.get(number, 0) + 1

    def keep_lanes(self, work_version: int) -> None:
        """Forget lanes that are gone, and that any of replaced edges was declared."""
        for lane in [lane for lane in self.lanes if is_bygone(lane, work_version)]:
            del self.lanes[lane]
        self.declared = {
            queue for queue in self.declared if work_version_of(queue) in (0, work_version)
        }

    def work_totals(self) -> tuple[WorkTotal, ...]:
        """`work` as it is reported."""
        return tuple(
            WorkTotal(model=model, bins=tuple(sorted(bins.items())))
            for model, bins in sorted(self.work.items())
        )

    def admit(self, request_id: RequestId, tenant: TenantId, tokens: int, *, at: UnixTime) -> bool:
        """A request was let in: its tenant holds more. False for a copy of one that counts."""
        key = identity(tenant, request_id)
        if key in self.outstanding:
            return False
        self.outstanding[key] = at
        self.shares.admit(key, tenant, tokens)
        return True

    def finish(self, request_id: RequestId, tenant: TenantId) -> None:
        """A request ended somewhere; unknown ones are ignored."""
        key = identity(tenant, request_id)
        self.outstanding.pop(key, None)
        self.shares.finish(key)

    def forget_unheard(self, before: UnixTime) -> None:
        """Count what was admitted *before* as ended: word of an end may get lost."""
        while self.outstanding:
            key, at = next(iter(self.outstanding.items()))
            if at >= before:
                break
            del self.outstanding[key]
            self.shares.finish(key)


def identity(tenant: TenantId, request_id: RequestId) -> str:
    """What tells requests apart: ids are the producers' own."""
    return f"{tenant}\0{request_id}"


@dataclass(slots=True, kw_only=True)
class LeaderState:
    """The leader's view of the cluster."""

    active_since: UnixTime | None = None
    """When this process became the active consumer; None while it is not."""
    epoch: int = 0
    instances: dict[str, InstanceStatus] = field(default_factory=dict)
    seen_at: dict[str, UnixTime] = field(default_factory=dict)
    model_since: dict[str, tuple[str | None, UnixTime]] = field(default_factory=dict)
    lanes: dict[tuple[str, str], LanesObserved] = field(default_factory=dict)
    """Last totals by (sender, incarnation)."""
    known_queues: set[str] = field(default_factory=set)
    waiting: dict[str, int] = field(default_factory=dict)
    """Ready messages by queue, at the last count."""
    profiles: dict[tuple[str, str, str], Profile] = field(default_factory=dict)
    plans: dict[str, PlanPublished] = field(default_factory=dict)
    places: Mapping[GroupId, tuple[InstanceId, int]] = field(default_factory=dict)
    """Who has each group by the plan in force, and at which place."""
    record: PlanRecord = field(default_factory=PlanRecord)
    advice: tuple[AdvisedInstances, ...] = ()
    """Of devices that are not enough."""
    alarms_heard: int = 0
    alarms_planned: int = 0
    """Of those heard, those that a plan was looked at after."""
    worker_restarts: int = 0

    @property
    def leads(self) -> bool:
        return self.active_since is not None

    def copied(self) -> "LeaderState":
        """What a snapshot is made from, as it is now: messages may come while one is made."""
        return replace(
            self,
            instances=dict(self.instances),
            model_since=dict(self.model_since),
            lanes=dict(self.lanes),
            waiting=dict(self.waiting),
            profiles=dict(self.profiles),
        )

    def on_status(self, status: InstanceStatus, now: UnixTime) -> None:
        """Take in a heartbeat; older ones of the same incarnation are ignored."""
        known = self.instances.get(status.instance_id)
        if known and known.incarnation == status.incarnation and known.seq >= status.seq:
            return
        if known is None or known.model != status.model:
            self.model_since[status.instance_id] = (status.model, now)
        self.instances[status.instance_id] = status
        self.seen_at[status.instance_id] = now
        self.epoch = max(self.epoch, status.plan_epoch)
        self.known_queues.update(status.pulled_by_lane)

    def on_lanes(self, observed: LanesObserved) -> list[str]:
        """Take in a grouper's totals; the lanes that something has been put into since."""
        sender = (observed.sender, observed.incarnation)
        before = self.lanes.get(sender)
        known = {total.lane: total.requests for total in before.lanes} if before else {}
        self.lanes[sender] = observed
        self.known_queues.update(total.lane for total in observed.lanes)
        return [total.lane for total in observed.lanes if total.requests != known.get(total.lane)]

    def on_profile(self, profile: Profile) -> None:
        """Keep the highest version of a profile."""
        key = (profile.model, profile.engine, profile.device)
        known = self.profiles.get(key)
        if known is None or profile.version >= known.version:
            self.profiles[key] = profile

    def count_groupers(self, since: UnixTime) -> int:
        """Of which something was heard *since*; 1 if none."""
        return max(1, sum(observed.at >= since for observed in self.lanes.values()))

    def forget_groupers(self, before: UnixTime) -> None:
        """Drop the totals of groupers that have been silent since *before*."""
        self.lanes = {
            sender: observed for sender, observed in self.lanes.items() if observed.at >= before
        }

    def excuse(self, missed_s: Seconds) -> None:
        """Nobody was heard for so long, since nobody listened here."""
        if missed_s:
            self.seen_at = {name: at + missed_s for name, at in self.seen_at.items()}

    def forget_silent(self, before: UnixTime) -> list[str]:
        """Drop instances that have been silent since *before*; which."""
        silent = [name for name, at in self.seen_at.items() if at < before]
        for name in silent:
            for table in (self.instances, self.seen_at, self.model_since, self.plans):
                table.pop(name, None)
        return silent
