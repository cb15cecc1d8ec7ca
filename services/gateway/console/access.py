"""Access to the console."""

from collections.abc import Mapping

from services.gateway.admission import authorization
from services.gateway.console.sessions import Sessions
from services.gateway.tenants import Caller, Tenants
from shared.contracts.errors import ContractError
from shared.contracts.tenants.keys import Scope


def may_view(
    tenants: Tenants, sessions: Sessions, headers: Mapping[str, str], peer: str | None
) -> None:
    """
    Check that a request may read the state of the mesh: it has a key, or comes from a browser that
    has opened the link. Its address and its host prove nothing, since a proxy passes them on.

    Args:
        tenants: Keys.
        sessions: Browsers that have opened the link.
        headers: All headers, whose names are in lower case.
        peer: Address of the other end of the connection.

    Raises:
        ContractError: The request needs a key with the scope `operator`.
    """
    if not sessions.has(headers):
        caller_with(tenants, headers, peer, Scope.OPERATOR)


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
