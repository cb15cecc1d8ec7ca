"""State of tenants' limits at a gateway, as OpenAI's headers `x-ratelimit-*`."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil

from cachetools import FIFOCache

from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, Seconds, TenantId, UnixTime
from shared.contracts.tenants.policies import (
    LimitKind,
    MeterGrant,
    RateLimit,
    TenantGrants,
    TenantPolicy,
)
from shared.runtime.clock import Clock

MEMORY_S: Seconds = 60.0
"""Time after which a limit that no grouper asks about is unused again."""
MAX_LIMITS = 20_000
"""Number of limits that are kept; those answered longest ago are dropped."""
NAMES = {"requests": LimitKind.REQUESTS, "tokens": LimitKind.TOKENS}
_decode: Decoder[TenantGrants] = Decoder(TenantGrants)


@dataclass(slots=True)
class RateLimits:
    """The allocator's last answers to groupers, which are a quarter of a second apart."""

    clock: Clock
    _known: FIFOCache[tuple[TenantId, LimitKind], tuple[UnixTime, MeterGrant]] = field(
        default_factory=lambda: FIFOCache(MAX_LIMITS)
    )

    def on_grants(self, grants: TenantGrants) -> None:
        """Record an answer to any grouper."""
        now = self.clock.now()
        for tenant, kinds in grants.meters.items():
            for kind in NAMES.values():
                if (grant := kinds.get(kind)) is not None:
                    self._known[tenant, kind] = now, grant

    def headers(self, tenant: TenantId, policy: TenantPolicy) -> dict[str, str]:
        """Headers for an answer to *tenant*: its limits per minute, and what is left of them."""
        found: dict[str, RateLimit] = {}
        for name, kind in NAMES.items():
            if (limit := policy.limit(kind)) is not None:
                found[name] = self._state(tenant, kind, limit)
        return headers_of(found)

    def _state(self, tenant: TenantId, kind: LimitKind, limit: int) -> RateLimit:
        at, grant = self._known.get((tenant, kind), (0.0, None))
        age_s = self.clock.now() - at
        if grant is None or age_s > MEMORY_S:
            return RateLimit(limit=limit, remaining=limit)
        return RateLimit(
            limit=limit,
            remaining=min(limit, grant.remaining),
            reset_s=max(0.0, grant.reset_s - age_s),
        )


def headers_of(limits: Mapping[str, RateLimit | None]) -> dict[str, str]:
    """OpenAI's headers about limits: `requests`, `tokens`."""
    headers = {}
    for name, state in limits.items():
        if state is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(state.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(state.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(state.reset_s)
    return headers


def duration(seconds: Seconds) -> str:
    """A duration as OpenAI writes it: `17ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@asynccontextmanager
async def limits_followed(broker: Broker, limits: RateLimits) -> AsyncIterator[None]:
    """Context in which *limits* gets the allocator's answers."""
    queue = topology.temporary_queue("gateway-limits")
    bindings = [(topology.TELEMETRY, topology.TENANT_GRANTS_KEY)]
    async with listening(broker, queue, _decode, bindings, limits.on_grants):
        yield
