"""Tenants' shares of outstanding work; work above a share goes to the overflow companion queue."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.contracts.base import TenantId


@dataclass(slots=True, kw_only=True)
class TenantShares:
    """
    Outstanding tokens per tenant.

    Args:
        max_share: Share of all outstanding tokens that one tenant may have while other tenants
            wait.
        free_tokens: Outstanding tokens below which no tenant is above its share.
        weight: Weight of a tenant: with twice the weight, twice the tokens are the same share.
    """

    max_share: float
    free_tokens: int
    weight: Callable[[TenantId], float] = lambda _tenant: 1.0
    _outstanding: dict[TenantId, int] = field(default_factory=dict)
    _requests: dict[str, tuple[TenantId, int, float]] = field(default_factory=dict)
    _total: int = 0
    _weighted: dict[TenantId, float] = field(default_factory=dict)
    """Outstanding tokens per tenant, divided by the weight that it had when they were admitted."""
    _total_weighted: float = 0.0

    def admit(self, request_id: str, tenant: TenantId, tokens: int) -> None:
        """Count a request as outstanding; a request that is already counted has no effect."""
        if request_id in self._requests:
            return
        weighted = tokens / self.weight(tenant)
        self._requests[request_id] = (tenant, tokens, weighted)
        self._weighted[tenant] = self._weighted.get(tenant, 0.0) + weighted
        self._total_weighted += weighted
        self._outstanding[tenant] = self._outstanding.get(tenant, 0) + tokens
        self._total += tokens

    def finish(self, request_id: str) -> None:
        """Remove a request that ended; an unknown request is ignored."""
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return
        tenant, tokens, weighted = entry
        if tenant not in self._outstanding:
            return  # it has no tokens, and is the tenant's last request
        self._total -= tokens
        self._total_weighted -= weighted
        self._weighted[tenant] -= weighted
        self._outstanding[tenant] -= tokens
        if self._outstanding[tenant] <= 0:
            del self._outstanding[tenant]
            self._total_weighted -= self._weighted.pop(tenant)  # the rest is rounding

    def above_share(self, tenant: TenantId, tokens: int) -> bool:
        """
        Return True if *tokens* more tokens would put *tenant* above its share while other tenants
        have work.
        """
        unweighted = self._outstanding.get(tenant, 0) + tokens
        if self._total == self._outstanding.get(tenant, 0) or unweighted <= self.free_tokens:
            return False
        before = self._weighted.get(tenant, 0.0)
        own, others = before + tokens / self.weight(tenant), self._total_weighted - before
        return own > self.max_share * (own + others)

    def outstanding(self, tenant: TenantId) -> int:
        """Number of outstanding tokens of *tenant*."""
        return self._outstanding.get(tenant, 0)

    @property
    def total(self) -> int:
        """Number of outstanding tokens of all tenants."""
        return self._total
