"""Limits of tenants at a grouper: a request is admitted with permits that all groupers share."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.planner.state import identity
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement
from shared.broker.retry import send_best_effort
from shared.contracts.base import (
    Decoder,
    Message,
    RequestId,
    Seconds,
    TenantId,
    UnixTime,
)
from shared.contracts.errors import CapacityError, ContractError
from shared.contracts.requests import QueuedRequest
from shared.contracts.tenants.policies import (
    QUOTA_SPENT,
    LimitKind,
    RateLimit,
    RateLimitedError,
    TenantDemand,
    TenantGrants,
    TenantPolicy,
)
from shared.contracts.tenants.usage import UsageToday
from shared.runtime.clock import Clock
from shared.tenants.policies import PolicySource
from solver.scheduling.window import tokens_needed
from solver.tenants.allocator import Allocator
from solver.tenants.leases import Holder

log = structlog.get_logger()
DEMAND_PERIOD_S: Seconds = 0.25
"""Period of publishing demands while limits are used."""
ASK_SPACING_S: Seconds = 0.02
"""Least time between two demands that requests wait for."""
WAIT_S: Seconds = 4.0
"""
Time for which requests wait for the allocator's first answer, before those of limited tenants are
refused: longer than a new allocator needs.
"""
RETRY_AFTER_S: Seconds = 1.0
DAY_S: Seconds = 86_400.0
_decode_demand: Decoder[TenantDemand] = Decoder(TenantDemand)

Needs = dict[LimitKind, int]


def needs_of(request: QueuedRequest, policy: TenantPolicy) -> Needs:
    """What a request uses of the limits that *policy* sets."""
    tokens = tokens_needed(request)
    amounts = {
        LimitKind.REQUESTS: 1,
        LimitKind.TOKENS: tokens,
        LimitKind.CONCURRENT: 1,
        LimitKind.OUTSTANDING: tokens,
    }
    return {kind: amounts[kind] for kind in policy.limits}


@dataclass(slots=True, kw_only=True)
class TenantGate:
    """
    Admits requests within the limits of their tenants.

    Args:
        policies: Policies of tenants.
        holder: Permits of this grouper.
        allocator: Grants permits to all groupers while this process consumes `headway.tenants`.
        outstanding: Number of a tenant's tokens in progress at this grouper.
    """

    broker: Broker
    clock: Clock
    policies: PolicySource
    holder: Holder
    allocator: Allocator
    outstanding: Callable[[TenantId], int]
    spent: dict[TenantId, int] = field(default_factory=dict)
    """Tokens that finished requests used on `day`, by tenant."""
    day: int = -1
    _open: "OrderedDict[str, tuple[UnixTime, TenantId, Needs]]" = field(default_factory=OrderedDict)
    """Admitted requests that have not ended, oldest first: what they use until then."""
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _asked_at: UnixTime = 0.0
    _greets: bool = True
    """True: the next demand is published even if no limit is used."""
    _unanswered_since: UnixTime | None = None

    async def admit(self, request: QueuedRequest) -> bool:
        """
        Use permits for *request*; return whether it has waited for them.

        Raises:
            RateLimitedError: A limit of the tenant is reached; the message names it.
            CapacityError: No allocator answers.
        """
        tenant, policy = request.tenant, self.policies.policy(request.tenant)
        self._check_budget(request, policy)
        needs = needs_of(request, policy)
        key = identity(tenant, request.request_id)
        if not needs or key in self._open:
            return False
        for kind, amount in needs.items():
            if amount > (policy.limit(kind) or 0):
                raise self._reached(
                    tenant, policy, kind, f"the request needs {amount}", RETRY_AFTER_S
                )
        now = self.clock.now()
        self.holder.ask(tenant, needs, now)
        waited = False
        if not self.holder.take(tenant, needs, now):
            await self._wait(tenant, policy, needs)
            waited = True
        if any(not kind.per_minute for kind in needs):
            self._open[key] = (self.clock.now(), tenant, needs)
        return waited

    async def _wait(self, tenant: TenantId, policy: TenantPolicy, needs: Needs) -> None:
        """Wait until there are permits, or it is known that there are none."""
        self.holder.wait(tenant, needs, begins=True)
        try:
            while True:
                now = self.clock.now()
                if (kind := self.holder.exhausted(tenant, needs, now)) is not None:
                    grant = self.holder.known(tenant, kind)
                    wait_s = RETRY_AFTER_S if grant is None else grant.next_s
                    raise self._reached(
                        tenant, policy, kind, "it is reached", max(RETRY_AFTER_S, wait_s)
                    )
                self._check_answers(now)
                answered = self._answered
                await self._ask(now)
                try:
                    async with asyncio.timeout(DEMAND_PERIOD_S):
                        await answered.wait()
                except TimeoutError:
                    continue
                if self.holder.take(tenant, needs, self.clock.now()):
                    return
        finally:
            self.holder.wait(tenant, needs, begins=False)

    def _check_answers(self, now: UnixTime) -> None:
        since = self._unanswered_since
        if since is None or now - since < WAIT_S:
            return
        if now - self._asked_at >= WAIT_S:
            self._unanswered_since = None  # no demand was published meanwhile
        else:
            raise CapacityError(
                "the limits of the tenant cannot be checked now: no grouper answers about them",
                retry_after_s=RETRY_AFTER_S,
                status=503,
            )

    def _check_budget(self, request: QueuedRequest, policy: TenantPolicy) -> None:
        budget, tenant = policy.daily_tokens, request.tenant
        if budget is None:
            return
        now = self.clock.now()
        spent = self.spent.get(tenant, 0) if self.day == int(now // DAY_S) else 0
        under_way = self.outstanding(tenant)
        if spent + under_way + tokens_needed(request) <= budget:
            return
        raise RateLimitedError(
            f"tenant {tenant!r} has used {spent} tokens today and has {under_way} in progress; its "
            f"daily_tokens are {budget}",
            retry_after_s=DAY_S - now % DAY_S,
            code=QUOTA_SPENT,
            requests=self._state(tenant, policy, LimitKind.REQUESTS),
            tokens=self._state(tenant, policy, LimitKind.TOKENS),
        )

    def _reached(
        self,
        tenant: TenantId,
        policy: TenantPolicy,
        kind: LimitKind,
        why: str,
        retry_after_s: Seconds,
    ) -> RateLimitedError:
        return RateLimitedError(
            f"limit {kind.value} of tenant {tenant!r} is {policy.limit(kind)}; {why}",
            retry_after_s=retry_after_s,
            code="rate_limit_exceeded",
            requests=self._state(tenant, policy, LimitKind.REQUESTS),
            tokens=self._state(tenant, policy, LimitKind.TOKENS),
        )

    def _state(self, tenant: TenantId, policy: TenantPolicy, kind: LimitKind) -> RateLimit | None:
        if (limit := policy.limit(kind)) is None:
            return None
        known = self.holder.known(tenant, kind)
        if known is None:
            return RateLimit(limit=limit, remaining=limit)
        return RateLimit(limit=limit, remaining=known.free, reset_s=known.reset_s)

    def ended(self, tenant: TenantId, request_id: RequestId) -> None:
        """A request has ended, or was not admitted after all; unknown requests are ignored."""
        found = self._open.pop(identity(tenant, request_id), None)
        if found is not None:
            self.holder.ended(tenant, found[2])

    def expire(self, before: UnixTime) -> None:
        """End requests that were admitted before *before*, since messages of ends may be lost."""
        while self._open:
            key, (at, tenant, needs) = next(iter(self._open.items()))
            if at >= before:
                break
            del self._open[key]
            self.holder.ended(tenant, needs)

    def on_usage(self, usage: UsageToday) -> None:
        """Record the tokens that tenants have used today."""
        self.spent, self.day = usage.tokens, usage.day

    def on_demand(self, demand: TenantDemand) -> None:
        """Record the demand of a grouper."""
        self.allocator.on_demand(demand, self.clock.now())

    def on_grants(self, grants: TenantGrants) -> None:
        """Take the permits of an answer."""
        now = self.clock.now()
        self.allocator.on_grants(grants, now)
        if not self.holder.on_grants(grants, now):
            return
        if grants.is_settled:
            self._unanswered_since = None
        answered, self._answered = self._answered, asyncio.Event()
        answered.set()

    async def allocate(self, delivery: Delivery) -> None:
        """Answer a demand in `headway.tenants`: the process that receives it is the allocator."""
        if delivery.has_returned():
            # Its connection is lost: the process that receives it again is the allocator.
            return
        now = self.clock.now()
        try:
            demand = _decode_demand(delivery.body)
        except ContractError as error:
            log.warning("demand.unreadable", error=str(error))
            await delivery.settle(Settlement.REJECT)
            return
        self.allocator.on_demand(demand, now)
        if self.allocator.term is None:
            log.info("allocator.began", source=self.holder.source)
            self.allocator.begin(now)
        answer = self.allocator.answer(demand.source, now)
        if answer is not None:
            await self._send(topology.TENANT_GRANTS_KEY, answer)
        await delivery.settle(Settlement.ACK)

    def deposed(self) -> None:
        """
        Give up the allocator's role when its consumer is broken: another process may be the
        allocator now, and demands may have been missed.
        """
        self.allocator.end()
        self.allocator.listens_since = self.clock.now()
        self._greets = True

    async def report(self) -> None:
        """Publish the next demand, if any limit is used."""
        now = self.clock.now()
        if now - self._asked_at >= ASK_SPACING_S:
            await self._demand(now)

    async def _ask(self, now: UnixTime) -> None:
        """Publish a demand at once, unless one was published just now."""
        if self._unanswered_since is None:
            self._unanswered_since = now
        if now - self._asked_at >= ASK_SPACING_S:
            await self._demand(now)

    async def _demand(self, now: UnixTime) -> None:
        if (demand := self.holder.demand(now, greets=self._greets)) is not None:
            self._asked_at, self._greets = now, False
            await self._send(topology.TENANT_DEMAND_KEY, demand)

    async def _send(self, key: str, message: Message) -> None:
        out = OutMessage.transient(message)
        await send_best_effort(self.broker, topology.TELEMETRY, key, out)
