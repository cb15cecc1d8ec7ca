"""What the planner remembers. Soft: all of it can be rebuilt from messages and counts."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.plans import PlanPublished
from shared.contracts.telemetry import InstanceStatus, LanesObserved, LaneTotal
from solver.routing.shares import TenantShares

RECENT_MARKS = 32


@dataclass(slots=True)
class LaneCounter:
    """A grouper's own totals of one lane."""

    requests: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    enqueued_at: deque[UnixTime] = field(default_factory=lambda: deque(maxlen=RECENT_MARKS))

    def add(self, *, prompt_tokens: int, max_tokens: int, at: UnixTime) -> None:
        """Count one request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.max_tokens += max_tokens
        self.enqueued_at.append(at)

    def total(self, lane: str) -> LaneTotal:
        return LaneTotal(
            lane=lane,
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            recent_enqueued_at=tuple(self.enqueued_at),
        )


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
    declared: set[str] = field(default_factory=set)
    outstanding: dict[str, UnixTime] = field(default_factory=dict)
    """Requests that count in the shares, and since when; the oldest first."""
    admitted: int = 0
    refused: int = 0
    seq: int = 0

    def admit(self, request_id: RequestId, tenant: TenantId, tokens: int, *, at: UnixTime) -> None:
        """A request went into a lane: its tenant holds more."""
        key = identity(tenant, request_id)
        self.outstanding.setdefault(key, at)
        self.shares.admit(key, tenant, tokens)
        self.admitted += 1

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

    def on_lanes(self, observed: LanesObserved) -> None:
        """Take in a grouper's totals."""
        self.lanes[observed.sender, observed.incarnation] = observed
        self.known_queues.update(total.lane for total in observed.lanes)

    def on_profile(self, profile: Profile) -> None:
        """Keep the highest version of a profile."""
        key = (profile.model, profile.engine, profile.device)
        known = self.profiles.get(key)
        if known is None or profile.version >= known.version:
            self.profiles[key] = profile

    def forget_groupers(self, before: UnixTime) -> None:
        """Drop the totals of groupers that have been silent since *before*."""
        self.lanes = {
            sender: observed for sender, observed in self.lanes.items() if observed.at >= before
        }

    def forget_silent(self, before: UnixTime) -> list[str]:
        """Drop instances that have been silent since *before*; which."""
        silent = [name for name, at in self.seen_at.items() if at < before]
        for name in silent:
            for table in (self.instances, self.seen_at, self.model_since, self.plans):
                table.pop(name, None)
        return silent
