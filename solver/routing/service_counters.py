"""Tokens that each tenant was served recently (QUARTZ §4.3)."""

from math import exp
from typing import NamedTuple

from shared.contracts.base import Seconds, TenantId, UnixTime


class _Counter(NamedTuple):
    tokens: float
    at: UnixTime


class ServiceCounters:
    """
    Tokens per tenant with exponential decay, counted at the first token of each request.

    The counter of a tenant never exceeds its total service. Under a steady rate it tends to the
    rate times *memory_s*. A counter is dropped when it is below *idle_tokens*.

    Args:
        memory_s: Time constant of the decay.
        idle_tokens: Least counter that is kept.

    Source: QUARTZ §4.3, after VTC.
    """

    def __init__(self, *, memory_s: Seconds = 10.0, idle_tokens: float = 1.0) -> None:
        self._memory_s = memory_s
        self._idle_tokens = idle_tokens
        self._counters: dict[TenantId, _Counter] = {}
        self._evicted_at: UnixTime | None = None

    def __len__(self) -> int:
        """Number of tenants with a counter."""
        return len(self._counters)

    def count(self, tenant: TenantId, tokens: int, now: UnixTime) -> None:
        """
        Count *tokens* served to *tenant*; the time *now* must not be much earlier than in the
        previous call.
        """
        before = self._counters.get(tenant)
        at = now if before is None else max(now, before.at)
        self._counters[tenant] = _Counter(self.tokens(tenant, at) + tokens, at)
        if self._evicted_at is None or now - self._evicted_at >= self._memory_s:
            self._evict_idle(now)

    def tokens(self, tenant: TenantId, now: UnixTime) -> float:
        """Decayed number of tokens of *tenant*; 0 for an unknown tenant."""
        counter = self._counters.get(tenant)
        return 0.0 if counter is None else self._decayed(counter, now)

    def rate_per_s(self, tenant: TenantId, now: UnixTime) -> float:
        """Recent tokens per second of *tenant*."""
        return self.tokens(tenant, now) / self._memory_s

    def _decayed(self, counter: _Counter, now: UnixTime) -> float:
        return counter.tokens * exp(-max(0.0, now - counter.at) / self._memory_s)

    def _evict_idle(self, now: UnixTime) -> None:
        self._evicted_at = now
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if self._decayed(counter, now) >= self._idle_tokens
        }
