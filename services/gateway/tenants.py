"""Authentication of tenants, and limits on their open requests."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import sha256

from services.gateway.headers import Hints
from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError, ContractError

RETRY_AFTER_S = 1.0


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


class Tenants:
    """
    Authenticates requests, and limits the number of open requests of each tenant.

    Args:
        api_keys: API key -> tenant; empty turns authentication off.
        default_tenant: Tenant of requests without an API key.
        trust_fairness_header: True if the fairness header takes precedence over the API key's
            tenant.
        max_outstanding: Maximum number of open requests per tenant.
    """

    def __init__(
        self,
        *,
        api_keys: Mapping[str, str],
        default_tenant: str,
        trust_fairness_header: bool,
        max_outstanding: int,
    ) -> None:
        # Looked up by digest, so that the lookup time reveals nothing about a key.
        self._tenants = {_digest(key): TenantId(tenant) for key, tenant in api_keys.items()}
        self._default = TenantId(default_tenant)
        self._trust_fairness_header = trust_fairness_header
        self._max_outstanding = max_outstanding
        self._open: Counter[TenantId] = Counter()

    @property
    def num_open(self) -> int:
        """Number of open requests of all tenants; each open request holds a slot."""
        return self._open.total()

    def authenticate(self, authorization: str | None) -> TenantId:
        """
        Return the tenant of the API key in an `Authorization: Bearer` header.

        Raises:
            ContractError: The key is missing or unknown (status 401).
        """
        if not self._tenants:
            return self._default
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self._tenants.get(_digest(key.strip()))
        if scheme.lower() != "bearer" or tenant is None:
            raise ContractError(
                "a valid API key is required: Authorization: Bearer <key>",
                code="invalid_api_key",
                status=401,
            )
        return tenant

    def effective(self, tenant: TenantId, hints: Hints) -> TenantId:
        """
        Tenant of the request; the client's fairness header is ignored unless the settings trust it.
        """
        if self._trust_fairness_header and hints.fairness_id is not None:
            return TenantId(hints.fairness_id)
        return tenant

    @contextlib.contextmanager
    def slot(self, tenant: TenantId) -> Iterator[None]:
        """
        Context in which the request holds one of the tenant's slots.

        Raises:
            CapacityError: All slots of the tenant are taken.
        """
        if self._open[tenant] >= self._max_outstanding:
            raise CapacityError(
                f"tenant {tenant} has {self._open[tenant]} requests open, which is its limit",
                retry_after_s=RETRY_AFTER_S,
            )
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
