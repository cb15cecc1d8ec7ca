"""The allocator of permits: what of each limit counts, and what each grouper is granted of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

from shared.contracts.base import TenantId, UnixTime
from shared.contracts.tenants.policies import (
    LimitKind,
    MeterDemand,
    MeterGrant,
    TenantDemand,
    TenantGrants,
)
from solver.tenants.leases import SILENCE_S, WINDOW_S, Key, Window

UNLIMITED = 10**15
"""
Limit that counts for a tenant without one in the policies of this process; a grouper with newer
policies may demand permits for it.
"""
_NOTHING = MeterDemand()
TERM_STEP = 0.001
"""Difference of the number of a new term from the highest one so far, if the clock is behind it."""


@dataclass(slots=True)
class _Grouper:
    """State of one grouper, by its demands and the grants for it."""

    heard_at: UnixTime
    """Time at which its last demand was received; without one, the first grant to it."""
    seq: int = 0
    at: UnixTime = 0.0
    applied: int = 0
    is_gone: bool = False
    meters: dict[Key, MeterDemand] = field(default_factory=dict)
    used: dict[Key, int] = field(default_factory=dict)
    under_way: list[tuple[int, UnixTime, dict[Key, int]]] = field(default_factory=list)
    """Grants that have perhaps not arrived: demand's number, demand's time, amounts."""
    assumed: dict[Key, int] = field(default_factory=dict)
    """Uses until the end of requests of a grouper that is gone; they count for a minute."""

    def counts(self, key: Key) -> int:
        demand = self.meters.get(key, _NOTHING)
        under_way = sum(amounts.get(key, 0) for _, _, amounts in self.under_way)
        return demand.balance + demand.open + under_way + self.assumed.get(key, 0)


@dataclass(slots=True, kw_only=True)
class Allocator:
    """
    Grants permits to all groupers while `term` is set; otherwise only records demands and grants.

    Args:
        limit: The limit of a tenant; None: no limit.
        listens_since: Time from which this process receives all demands.
    """

    limit: Callable[[TenantId, LimitKind], int | None]
    listens_since: UnixTime
    term: float | None = None
    _highest_term: float = 0.0
    began_at: UnixTime = -inf
    """Time at which the term began."""
    _groupers: dict[str, _Grouper] = field(default_factory=dict)
    _windows: dict[Key, Window] = field(default_factory=dict)

    def begin(self, now: UnixTime) -> None:
        """
        Begin a term, unless this process is the allocator already. Its number is above all that
        groupers follow, also if the clock of an earlier allocator was ahead.
        """
        if self.term is None:
            self.term, self.began_at = max(now, self._highest_term + TERM_STEP), now

    def end(self) -> None:
        """Another process is the allocator."""
        self.term = None

    def on_demand(self, demand: TenantDemand, now: UnixTime) -> None:
        """Record a demand; older ones and repetitions change nothing."""
        self._forget_silent(now)
        self._highest_term = max(self._highest_term, demand.term)
        if self.term is not None and demand.term > self.term:
            self.end()  # another process has taken over
        known = self._groupers.get(demand.source)
        if known is not None and demand.seq <= known.seq:
            return
        is_new = known is None or not known.seq
        grouper = known or _Grouper(heard_at=now)
        self._groupers[demand.source] = grouper
        grouper.heard_at, grouper.is_gone = now, False
        grouper.seq, grouper.at, grouper.applied = demand.seq, demand.at, demand.applied
        grouper.assumed.clear()
        grouper.meters = {
            (tenant, kind): meter
            for tenant, kinds in demand.meters.items()
            for kind, meter in kinds.items()
        }
        for key, meter in grouper.meters.items():
            _, kind = key
            before = grouper.used.get(key)
            grouper.used[key] = meter.used
            if kind.per_minute:
                new = meter.in_window if is_new else meter.used - (before or 0)
                self._window(key).add(new, now)
        grouper.under_way = [
            each
            for each in grouper.under_way
            if each[0] > demand.applied and demand.at - each[1] < SILENCE_S
        ]

    def on_grants(self, grants: TenantGrants, now: UnixTime) -> None:
        """Record the grants of another allocator, for the case that this one takes over."""
        if grants.term == self.term:
            return
        grouper = self._groupers.get(grants.to)
        if grouper is None:
            grouper = self._groupers[grants.to] = _Grouper(heard_at=now)
        amounts = {
            (tenant, kind): grant.granted
            for tenant, kinds in grants.meters.items()
            for kind, grant in kinds.items()
            if grant.granted
        }
        if amounts and grants.answers > grouper.applied:
            grouper.under_way.append((grants.answers, grants.answers_at, amounts))

    def answer(self, source: str, now: UnixTime) -> TenantGrants | None:
        """
        The answer to the last demand of *source*; None without a term, or if the grouper is gone.
        """
        grouper = self._groupers.get(source)
        if self.term is None or grouper is None or grouper.is_gone:
            return None
        may_grant = self._is_settled(now)
        amounts: dict[Key, int] = {}
        meters: dict[TenantId, dict[LimitKind, MeterGrant]] = {}
        if any(number == grouper.seq for number, _, _ in grouper.under_way):
            return None  # answered already
        for key, demand in grouper.meters.items():
            grant = self._grant(key, grouper, demand, now, may_grant=may_grant)
            tenant, kind = key
            meters.setdefault(tenant, {})[kind] = grant
            if grant.granted:
                amounts[key] = grant.granted
        if amounts:
            grouper.under_way.append((grouper.seq, grouper.at, amounts))
        return TenantGrants(
            to=source,
            term=self.term,
            answers=grouper.seq,
            answers_at=grouper.at,
            is_settled=may_grant,
            meters=meters,
        )

    def _grant(
        self, key: Key, grouper: _Grouper, demand: MeterDemand, now: UnixTime, *, may_grant: bool
    ) -> MeterGrant:
        window = self._windows.get(key)
        in_window = 0 if window is None else window.expire(now)
        known = self.limit(*key)
        limit = UNLIMITED if known is None else known
        free = max(0, limit - in_window - sum(each.counts(key) for each in self._groupers.values()))
        granted = 0
        if may_grant:
            has = grouper.counts(key) - demand.open
            granted = self._share(key, free, grouper, demand.wanted - has)
            if demand.wanted and has + granted < demand.unit:
                # A part of a request is of no use; another grouper may need it for a whole one.
                granted = demand.unit - has if demand.unit - has <= free else 0
        opened = sum(each.meters.get(key, _NOTHING).open for each in self._groupers.values())
        return MeterGrant(
            limit=limit,
            granted=granted,
            free=free - granted if may_grant else free,
            remaining=max(0, limit - in_window - opened),
            next_s=0.0 if window is None else window.next_s(now),
            reset_s=0.0 if window is None else window.reset_s(now),
        )

    def _share(self, key: Key, free: int, grouper: _Grouper, wanted: int) -> int:
        """The grouper's part of the *free* permits, in proportion to the wanted permits of all."""
        if wanted <= 0 or free <= 0:
            return 0
        others = sum(
            max(0, each.meters[key].wanted - each.counts(key) + each.meters[key].open)
            for each in self._groupers.values()
            if each is not grouper and key in each.meters
        )
        return min(wanted, free, ceil(free * wanted / (wanted + others)))

    def _is_settled(self, now: UnixTime) -> bool:
        """Return whether all permits that groupers may have are known."""
        return now - max(self.listens_since, self.began_at) >= SILENCE_S

    def _forget_silent(self, now: UnixTime) -> None:
        """Take the permits of silent groupers as used."""
        for source, grouper in tuple(self._groupers.items()):
            silent_s = now - grouper.heard_at
            if grouper.is_gone and silent_s >= SILENCE_S + WINDOW_S:
                del self._groupers[source]
            elif not grouper.is_gone and silent_s >= SILENCE_S:
                self._take_as_used(grouper, now)

    def _take_as_used(self, grouper: _Grouper, now: UnixTime) -> None:
        grouper.is_gone = True
        keys = {*grouper.meters, *(key for _, _, amounts in grouper.under_way for key in amounts)}
        for key in keys:
            _, kind = key
            if kind.per_minute:
                self._window(key).add(grouper.counts(key), now)
            else:
                grouper.assumed[key] = grouper.counts(key)
        grouper.meters, grouper.under_way = {}, []

    def _window(self, key: Key) -> Window:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window()
        return window
