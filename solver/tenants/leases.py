"""
How groupers share the limits of tenants: permits that one allocator grants to all groupers.

A permit is one request, or one token. A grouper admits a request only with permits that it was
granted before. A permit per minute counts from its grant until one minute after its use is known;
a permit for requests in progress counts until the end of the request is known. The allocator never
lets more permits count than the limit has. So in no minute are more used, whatever is lost, late or
dead:

Take all permits that were used in one minute, and the last grant of one of them. At that moment all
of them were granted, none was returned, and none was used more than a minute before. So all of them
counted, and there are at most as many as the limit has.

Every grouper receives all demands and grants, so that each can be the allocator. A new allocator
begins a term. It grants nothing for `SILENCE_S`, after which the grants of earlier terms that have
not arrived are void, and all permits that groupers have are known.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.contracts.tenants.policies import (
    LimitKind,
    MeterDemand,
    MeterGrant,
    TenantDemand,
    TenantGrants,
)

WINDOW_S: Seconds = 60.0
SILENCE_S: Seconds = 2.0
"""
Time without an answer after which a grouper does not use its permits, and time without a demand
after which the allocator takes them as used.
"""
DEMAND_MEMORY_S: Seconds = 1.0
"""Time over which a grouper measures the rate of requests."""
HORIZON_S: Seconds = 0.6
"""Time ahead for which a grouper demands permits, at the present rate of requests."""
IDLE_S: Seconds = 5.0
"""Time without a request after which a grouper keeps no permits in reserve."""
PLENTY = 8
"""
Number of requests like the last one for which permits must be free, so that a grouper keeps those
for one request in reserve.
"""
HINT_S: Seconds = 0.5
"""Age up to which the answer that nothing is free refuses requests."""

Key = tuple[TenantId, LimitKind]
Needs = Mapping[LimitKind, int]


@dataclass(slots=True)
class Window:
    """Amounts that count for one minute."""

    total: int = 0
    _uses: deque[tuple[UnixTime, int]] = field(default_factory=deque)

    def add(self, amount: int, now: UnixTime) -> None:
        """Count an amount from now on."""
        if amount > 0:
            self._uses.append((now, amount))
            self.total += amount

    def expire(self, now: UnixTime) -> int:
        """Drop what has counted for a minute; return the total of the rest."""
        while self._uses and now - self._uses[0][0] >= WINDOW_S:
            self.total -= self._uses.popleft()[1]
        return self.total

    def next_s(self, now: UnixTime) -> Seconds:
        """Time until an amount no longer counts; 0 if none counts."""
        return max(0.0, self._uses[0][0] + WINDOW_S - now) if self._uses else 0.0

    def reset_s(self, now: UnixTime) -> Seconds:
        """Time until nothing counts any more."""
        return max(0.0, self._uses[-1][0] + WINDOW_S - now) if self._uses else 0.0


@dataclass(slots=True)
class _Meter:
    """One limit of one tenant at one grouper."""

    kind: LimitKind
    balance: int = 0
    used: int = 0
    window: Window = field(default_factory=Window)
    open: int = 0
    pending: int = 0
    """What the requests need that wait for permits."""
    asked: deque[tuple[UnixTime, int]] = field(default_factory=deque)
    asked_at: UnixTime = -inf
    used_at: UnixTime = -inf
    """Time of the last demand in which it was not idle."""
    unit: int = 0
    """What the last request needed; less than this is of no use."""
    starves: bool = False
    """True if the last request got no permits, and no grant came since."""
    grant: MeterGrant | None = None
    granted_at: UnixTime = -inf

    def ask(self, amount: int, now: UnixTime) -> None:
        self.asked.append((now, amount))
        self.asked_at, self.unit = now, amount

    def take(self, amount: int, now: UnixTime) -> None:
        self.balance -= amount
        self.used += amount
        if self.kind.per_minute:
            self.window.add(amount, now)
        else:
            self.open += amount

    def wanted(self, now: UnixTime) -> int:
        """Balance for the requests of the next moments."""
        while self.asked and now - self.asked[0][0] > DEMAND_MEMORY_S:
            self.asked.popleft()
        recent = sum(amount for _, amount in self.asked) / DEMAND_MEMORY_S
        needed = self.pending + int(recent * HORIZON_S)
        is_idle = now - self.asked_at > IDLE_S
        if is_idle or self.grant is None or self.grant.free < PLENTY * self.unit:
            return needed
        return max(needed, self.unit)  # the next request need not wait

    def give_back(self, wanted: int) -> None:
        """Return the permits that are not wanted or of no use."""
        self.balance = min(self.balance, wanted)
        if self.balance < self.unit or (self.starves and not self.pending):
            self.balance = 0


@dataclass(slots=True, kw_only=True)
class Holder:
    """
    The permits of one grouper.

    Args:
        source: Unique name of the grouper process.
    """

    source: str
    term: float = 0.0
    """Term of the allocator that this grouper follows; 0 before the first answer."""
    seq: int = 0
    applied: int = 0
    """Number of the last demand whose answer has arrived."""
    answered_at: UnixTime = -inf
    """Time of this demand."""
    _meters: dict[Key, _Meter] = field(default_factory=dict)
    _active: set[Key] = field(default_factory=set)
    """Keys of meters that are not idle."""

    def ask(self, tenant: TenantId, needs: Needs, now: UnixTime) -> None:
        """Count a request that arrives, so that demands ask for requests like it."""
        for kind, amount in needs.items():
            self._meter(tenant, kind).ask(amount, now)

    def take(self, tenant: TenantId, needs: Needs, now: UnixTime) -> bool:
        """Use permits for a request, all that it needs or none; return whether there were all."""
        meters = [(self._meter(tenant, kind), amount) for kind, amount in needs.items()]
        if self._is_lapsed(now):
            for meter, _ in meters:
                meter.balance = 0
        if any(meter.balance < amount for meter, amount in meters):
            for meter, _ in meters:
                meter.starves = True
            return False
        for meter, amount in meters:
            meter.take(amount, now)
            meter.starves = False
        return True

    def ended(self, tenant: TenantId, needs: Needs) -> None:
        """A request that had taken permits has ended."""
        for kind, amount in needs.items():
            meter = self._meters.get((tenant, kind))
            if meter is not None and not kind.per_minute:
                meter.open -= amount

    def wait(self, tenant: TenantId, needs: Needs, *, begins: bool) -> None:
        """A request begins to wait for permits, or no longer waits."""
        for kind, amount in needs.items():
            self._meter(tenant, kind).pending += amount if begins else -amount

    def exhausted(self, tenant: TenantId, needs: Needs, now: UnixTime) -> LimitKind | None:
        """
        The limit because of which a request cannot be admitted now, by an answer that is at most
        `HINT_S` old; None: it is not known.
        """
        for kind, amount in needs.items():
            meter = self._meter(tenant, kind)
            if meter.grant is None or now - meter.granted_at > HINT_S:
                continue
            if meter.balance < amount and meter.balance + meter.grant.free < amount:
                return kind
        return None

    def known(self, tenant: TenantId, kind: LimitKind) -> MeterGrant | None:
        """The last answer about a limit."""
        meter = self._meters.get((tenant, kind))
        return None if meter is None else meter.grant

    def demand(self, now: UnixTime, *, greets: bool = False) -> TenantDemand | None:
        """
        The next demand; None if this grouper has no use of any limit. It returns permits that are
        not wanted.

        Args:
            now: Unix seconds.
            greets: True: there is a demand in any case, so that an allocator begins its term.
        """
        self._lapse(now)
        meters: dict[TenantId, dict[LimitKind, MeterDemand]] = {}
        for key in tuple(self._active):
            tenant, kind = key
            meter = self._meters[key]
            wanted = meter.wanted(now)
            meter.give_back(wanted)
            in_window = meter.window.expire(now)
            if wanted or in_window or meter.open or meter.balance:
                meter.used_at = now
            elif now - meter.used_at > SILENCE_S:
                self._active.discard(key)
                continue  # the allocator has received demands without use for the whole time
            meters.setdefault(tenant, {})[kind] = MeterDemand(
                balance=meter.balance,
                used=meter.used,
                in_window=in_window,
                open=meter.open,
                wanted=wanted,
                unit=meter.unit,
            )
        if not meters and not greets:
            return None
        self.seq += 1
        return TenantDemand(
            source=self.source,
            seq=self.seq,
            at=now,
            term=self.term,
            applied=self.applied,
            meters=meters,
        )

    def on_grants(self, grants: TenantGrants, now: UnixTime) -> bool:
        """Take the permits of an answer; return whether the answer is of use."""
        if grants.to != self.source or grants.term < self.term or grants.answers <= self.applied:
            return False
        self._lapse(now)
        self.term, self.applied = grants.term, grants.answers
        self.answered_at = grants.answers_at
        is_late = now - grants.answers_at >= SILENCE_S
        for tenant, kinds in grants.meters.items():
            for kind, grant in kinds.items():
                meter = self._meter(tenant, kind)
                meter.grant, meter.granted_at = grant, grants.answers_at
                if grant.granted and not is_late:
                    meter.balance += grant.granted
                    meter.starves = False
        return not is_late

    def _lapse(self, now: UnixTime) -> None:
        if self._is_lapsed(now):
            for key in self._active:
                self._meters[key].balance = 0

    def _is_lapsed(self, now: UnixTime) -> bool:
        return now - self.answered_at >= SILENCE_S

    def _meter(self, tenant: TenantId, kind: LimitKind) -> _Meter:
        # Kept without limit: the allocator compares the total of uses with the total before.
        meter = self._meters.get((tenant, kind))
        if meter is None:
            meter = self._meters[tenant, kind] = _Meter(kind)
        self._active.add((tenant, kind))
        return meter
