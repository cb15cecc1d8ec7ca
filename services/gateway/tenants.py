"""Authentication of tenants, and limits on their open requests."""

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from services.gateway.headers import MAX_LABEL_CHARS, Hints
from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError, ContractError, SettingsError
from shared.contracts.tenants.keys import Scope
from shared.contracts.tenants.policies import TenantPolicy
from shared.runtime.clock import Clock, SystemClock
from shared.tenants.keys import KeySource, SettingsKeys
from shared.tenants.policies import Policies, PolicySource

RETRY_AFTER_S = 1.0
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request."""

    tenant: TenantId
    scopes: tuple[Scope, ...]
    by: str
    """How the tenant is known: the id of a key, `proxy`, or empty without authentication."""


def networks_of(addresses: Sequence[str]) -> tuple[Network, ...]:
    """
    Networks of the setting `trusted_proxies`.

    Raises:
        SettingsError: One is neither an address nor a network.
    """
    try:
        return tuple(ipaddress.ip_network(each) for each in addresses)
    except ValueError as error:
        raise SettingsError(f"trusted_proxies: {error}") from error


class Tenants:
    """
    Authenticates requests, and limits the number of open requests of each tenant.

    Args:
        api_keys: API key -> tenant; without them, `keys` and `identity_header`, authentication is
            off.
        default_tenant: Tenant of requests without an API key.
        trust_fairness_header: True if the fairness header takes precedence over the API key's
            tenant.
        max_outstanding: Maximum number of open requests per tenant.
        keys: Further keys.
        policies: Policies of tenants.
        identity_header: Header, in lower case, in which a trusted proxy names the tenant.
        trusted_proxies: Networks from which this header is read.
        clock: Wall time, for the expiry of keys.
    """

    def __init__(
        self,
        *,
        api_keys: Mapping[str, str],
        default_tenant: str,
        trust_fairness_header: bool,
        max_outstanding: int,
        keys: KeySource | None = None,
        policies: PolicySource | None = None,
        identity_header: str | None = None,
        trusted_proxies: Sequence[Network] = (),
        clock: Clock | None = None,
    ) -> None:
        self._sources = [
            *([SettingsKeys(api_keys)] if api_keys else []),
            *([] if keys is None else [keys]),
        ]
        self._default = TenantId(default_tenant)
        self._trust_fairness_header = trust_fairness_header
        self._max_outstanding = max_outstanding
        self._policies: PolicySource = policies or Policies()
        self._identity_header = identity_header
        self._trusted_proxies = tuple(trusted_proxies)
        self._clock = clock or SystemClock()
        self._open: Counter[TenantId] = Counter()

    @property
    def num_open(self) -> int:
        """Number of open requests of all tenants; each open request holds a slot."""
        return self._open.total()

    def policy(self, tenant: TenantId) -> TenantPolicy:
        """The policy of a tenant."""
        return self._policies.policy(tenant)

    def authenticate(
        self,
        authorization: str | None,
        *,
        headers: Mapping[str, str] | None = None,
        peer: str | None = None,
        scope: Scope | None = Scope.INFERENCE,
    ) -> TenantId:
        """
        Return the tenant of a request.

        Args:
            authorization: The header `Authorization`.
            headers: All headers, whose names are in lower case.
            peer: Address of the other end of the connection.
            scope: What the key must allow; None: nothing in particular.

        Raises:
            ContractError: The key is missing, unknown, expired or revoked (status 401), or is not
                for this (status 403).
        """
        caller = self.caller(authorization, headers=headers, peer=peer)
        if scope is not None and scope not in caller.scopes:
            raise ContractError(
                f"this API key may not be used for {scope.value}",
                code="insufficient_scope",
                status=403,
            )
        return caller.tenant

    def caller(
        self,
        authorization: str | None,
        *,
        headers: Mapping[str, str] | None = None,
        peer: str | None = None,
    ) -> Caller:
        """
        Return the sender of a request, named by a trusted proxy or by an API key.

        Raises:
            ContractError: As for `authenticate`.
        """
        if (named := self._named_by_proxy(headers or {}, peer)) is not None:
            usual = (Scope.INFERENCE, Scope.FILES, Scope.BATCHES)
            return Caller(tenant=named, scopes=usual, by="proxy")
        if not self._sources and self._identity_header is None:
            return Caller(tenant=self._default, scopes=tuple(Scope), by="")
        scheme, _, key = (authorization or "").partition(" ")
        entry = None
        if scheme.lower() == "bearer":
            found = (source.find(key.strip()) for source in self._sources)
            entry = next((each for each in found if each is not None), None)
        if entry is None or not entry.is_valid(self._clock.now()):
            raise ContractError(
                "a valid API key is required: Authorization: Bearer <key>",
                code="invalid_api_key",
                status=401,
            )
        return Caller(tenant=entry.tenant, scopes=entry.scopes, by=entry.id)

    def _named_by_proxy(self, headers: Mapping[str, str], peer: str | None) -> TenantId | None:
        """The tenant that a trusted proxy names; the header of others is ignored."""
        name = None if self._identity_header is None else headers.get(self._identity_header)
        if name is None or peer is None or not self._is_trusted(peer):
            return None
        if not 1 <= len(name) <= MAX_LABEL_CHARS:
            raise ContractError(
                f"header {self._identity_header} must have 1 to {MAX_LABEL_CHARS} characters",
                code="invalid_header",
                param=self._identity_header,
            )
        return TenantId(name)

    def _is_trusted(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._trusted_proxies)

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
        Context in which the request holds one of the tenant's slots: those of the settings, and of
        its policy, which groupers enforce for all gateways.

        Raises:
            CapacityError: All slots of the tenant are taken.
        """
        limit = self._max_outstanding
        if (allowed := self.policy(tenant).concurrent_requests) is not None:
            limit = min(limit, allowed)
        if self._open[tenant] >= limit:
            raise CapacityError(
                f"tenant {tenant} has {self._open[tenant]} requests open, which is its limit",
                retry_after_s=RETRY_AFTER_S,
            )
        with self.counted(tenant):
            yield

    @contextlib.contextmanager
    def counted(self, tenant: TenantId) -> Iterator[None]:
        """Context in which a request of the tenant is open, whatever the limit."""
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
