"""Access to the console."""

import ipaddress
from collections.abc import Mapping

from services.gateway.admission import authorization
from services.gateway.tenants import Caller, Tenants
from shared.contracts.errors import ContractError
from shared.contracts.tenants.keys import Scope

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def may_view(tenants: Tenants, headers: Mapping[str, str], peer: str | None) -> None:
    """
    Check that a request may read the state of the mesh.

    A browser on the gateway's own machine needs no key. Requests that a proxy passes on come from
    the same machine as well, so their headers decide; a page of another site cannot use the
    browser, because it names another host.

    Args:
        tenants: Keys.
        headers: All headers, whose names are in lower case.
        peer: Address of the other end of the connection.

    Raises:
        ContractError: The request needs a key with the scope `operator`.
    """
    if not is_local(headers, peer):
        caller_with(tenants, headers, peer, Scope.OPERATOR)


def is_local(headers: Mapping[str, str], peer: str | None) -> bool:
    """Return whether a browser on this machine sent a request."""
    if peer is None or any(name in headers for name in _PROXY_HEADERS):
        return False
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    try:
        return name in _LOCAL_NAMES and ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return False


def caller_with(
    tenants: Tenants, headers: Mapping[str, str], peer: str | None, scope: Scope
) -> Caller:
    """
    The sender of a request, if a key allows *scope*.

    Raises:
        ContractError: There is no key (status 401), or it does not allow *scope* (status 403).
    """
    caller = tenants.caller(authorization(headers), headers=headers, peer=peer)
    if not caller.by or scope not in caller.scopes:
        raise ContractError(
            f"this needs an API key with the scope {scope.value}: "
            f"headway keys create --tenant NAME --scope {scope.value}",
            code="insufficient_scope",
            status=403,
        )
    return caller
