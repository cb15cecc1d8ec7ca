"""Tenants' shares of outstanding work; work above a share goes to the overflow companion queue."""

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
    """

    max_share: float
    free_tokens: int
    _outstanding: dict[TenantId, int] = field(default_factory=dict)
    _requests: dict[str, tuple[TenantId, int]] = field(default_factory=dict)
    _total: int = 0

    def admit(self, request_id: str, tenant: TenantId, tokens: int) -> None:
        """Count a request as outstanding; a request that is already counted has no effect."""
        if request_id in self._requests:
            return
        self._requests[request_id] = (tenant, tokens)
        self._outstanding[tenant] = self._outstanding.get(tenant, 0) + tokens
        self._total += tokens

    def finish(self, request_id: str) -> None:
        """Remove a request that ended; an unknown request is ignored."""
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return
        tenant, tokens = entry
        self._total -= tokens
        self._outstanding[tenant] -= tokens
        if self._outstanding[tenant] <= 0:
            del self._outstanding[tenant]

    def above_share(self, tenant: TenantId, tokens: int) -> bool:
        """
        Return True if *tokens* more tokens would put *tenant* above its share while other tenants
        have work.
        """
        own = self._outstanding.get(tenant, 0) + tokens
        others = self._total - self._outstanding.get(tenant, 0)
        if others <= 0 or own <= self.free_tokens:
            return False
        return own > self.max_share * (own + others)

    def outstanding(self, tenant: TenantId) -> int:
        """Number of outstanding tokens of *tenant*."""
        return self._outstanding.get(tenant, 0)

    @property
    def total(self) -> int:
        return self._total
