"""Groupers that share one limit in virtual time: late and lost messages, stalls and deaths."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle

from shared.contracts.base import TenantId
from shared.contracts.tenants.policies import LimitKind, TenantDemand, TenantGrants
from solver.tenants.allocator import Allocator
from solver.tenants.leases import WINDOW_S, Holder

TENANT = TenantId("acme")
START = 1_000_000.0


@dataclass
class Grouper:
    """One process: it has permits, and could grant permits."""

    holder: Holder
    allocator: Allocator
    is_dead: bool = False
    stalled_until: float = 0.0


@dataclass
class World:
    """
    All groupers, and the messages between them.

    Args:
        limit: Limit of the tenant.
        kind: Which limit it is.
        delays: Delays of messages in seconds, one after the other; None: an answer is lost.
    """

    limit: int
    kind: LimitKind
    delays: Sequence[float | None]
    now: float = START
    groupers: list[Grouper] = field(default_factory=list)
    uses: list[tuple[float, int]] = field(default_factory=list)
    refused: int = 0
    open: list[tuple[Grouper, int]] = field(default_factory=list)
    _messages: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = count()
        self._delays = cycle(self.delays)

    def start(self) -> Grouper:
        """Start a grouper."""
        grouper = Grouper(
            Holder(source=f"grouper-{len(self.groupers)}"),
            Allocator(limit=lambda _tenant, _kind: self.limit, listens_since=self.now),
        )
        self.groupers.append(grouper)
        return grouper

    @property
    def living(self) -> list[Grouper]:
        """Groupers that have not died, oldest first; the first one gets the demands."""
        return [grouper for grouper in self.groupers if not grouper.is_dead]

    def request(self, grouper: Grouper, amount: int) -> bool:
        """A request arrives; return whether it was admitted."""
        if grouper.is_dead or grouper.stalled_until > self.now:
            return False
        needs = {self.kind: amount}
        grouper.holder.ask(TENANT, needs, self.now)
        if grouper.holder.take(TENANT, needs, self.now):
            self.uses.append((self.now, amount))
            if not self.kind.per_minute:
                self.open.append((grouper, amount))
            self._check()
            return True
        self.refused += 1
        if grouper.holder.exhausted(TENANT, needs, self.now) is None:
            self.report(grouper)
        return False

    def end(self, number: int) -> None:
        """One of the requests in progress ends."""
        if self.open:
            grouper, amount = self.open.pop(number % len(self.open))
            grouper.holder.ended(TENANT, {self.kind: amount})

    def report(self, grouper: Grouper) -> None:
        """A grouper publishes its demand."""
        if grouper.is_dead or grouper.stalled_until > self.now:
            return
        demand = grouper.holder.demand(self.now)
        if demand is None:
            return
        for other in self.groupers:
            self._send(lambda other=other: self._hear(other, demand))
        self._send(lambda: self._allocate(demand))

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._messages and self._messages[0][0] <= until:
            at, _, deliver = heapq.heappop(self._messages)
            self.now = max(self.now, at)
            deliver()
        self.now = until

    def kill(self, grouper: Grouper) -> None:
        """End a process; its requests continue."""
        grouper.is_dead = True

    def _send(self, deliver: Callable[[], None], *, may_be_lost: bool = False) -> None:
        delay_s = next(self._delays)
        if delay_s is None and may_be_lost:
            return
        at = self.now + (delay_s or 0.0)
        heapq.heappush(self._messages, (at, next(self._order), deliver))

    def _hear(self, grouper: Grouper, demand: TenantDemand) -> None:
        if not self._later(grouper, lambda: self._hear(grouper, demand)):
            grouper.allocator.on_demand(demand, self.now)

    def _allocate(self, demand: TenantDemand) -> None:
        if not self.living:
            return
        grouper = self.living[0]
        if self._later(grouper, lambda: self._allocate(demand)):
            return
        grouper.allocator.on_demand(demand, self.now)
        grouper.allocator.begin(self.now)
        answer = grouper.allocator.answer(demand.source, self.now)
        if answer is not None:
            for other in self.groupers:
                self._send(lambda other=other: self._note(other, answer))
                self._send(lambda other=other: self._take(other, answer), may_be_lost=True)

    def _note(self, grouper: Grouper, grants: TenantGrants) -> None:
        if not self._later(grouper, lambda: self._note(grouper, grants)):
            grouper.allocator.on_grants(grants, self.now)

    def _take(self, grouper: Grouper, grants: TenantGrants) -> None:
        if not self._later(grouper, lambda: self._take(grouper, grants)):
            grouper.holder.on_grants(grants, self.now)

    def _later(self, grouper: Grouper, deliver: Callable[[], None]) -> bool:
        """True if the process is dead, or stalled: then it gets the message afterwards."""
        if grouper.is_dead:
            return True
        if grouper.stalled_until > self.now:
            heapq.heappush(self._messages, (grouper.stalled_until, next(self._order), deliver))
            return True
        return False

    def used_within(self, at: float) -> int:
        """What was used in the minute before *at*."""
        return sum(amount for used_at, amount in self.uses if at - WINDOW_S < used_at <= at)

    def _check(self) -> None:
        if self.kind.per_minute:
            used = self.used_within(self.now)
        else:
            used = sum(amount for grouper, amount in self.open if not grouper.is_dead)
        assert used <= self.limit, f"{used} of {self.limit} are used at {self.now - START:.3f} s"
