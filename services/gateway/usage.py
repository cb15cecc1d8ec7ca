"""`GET /v1/usage`: what finished requests of the caller's tenant have used."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.admission import authorization
from services.gateway.state import Gateway
from shared.contracts.base import TenantId, UnixTime
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.tenants.keys import Scope
from shared.contracts.tenants.usage import UsageRequested
from shared.tenants.usage_questions import BY, ask_usage, parse_time

DEFAULT_SPAN_S = 30 * 86_400.0


async def usage(
    gateway: Gateway,
    headers: Mapping[str, str],
    peer: str | None,
    query: Mapping[str, str],
) -> bytes:
    """
    JSON of the rows of the caller's tenant; a key with the scope `operator` may name another one,
    or `*` for all.

    Args:
        gateway: Components of the gateway.
        headers: Headers of the request, with names in lower case.
        peer: Address of the other end.
        query: `since`, `until` (Unix seconds, a date, or a duration such as `24h`), `by`, `tenant`.

    Raises:
        ContractError: The key or a parameter is not valid.
        TransientError: No process counts usage.
    """
    tenant = named_tenant(gateway, headers, peer, query)
    now = gateway.clock.now()
    by = tuple(filter(None, query.get("by", "hour").split(",")))
    if unknown := [each for each in by if each not in BY]:
        raise ContractError(f"by: {unknown[0]!r} is not one of {', '.join(BY)}", param="by")
    since = time_of(query, "since", now) or now - DEFAULT_SPAN_S
    until = time_of(query, "until", now)
    if gateway.broker is None:
        raise TransientError("usage is not available")
    found = await ask_usage(
        gateway.broker,
        lambda reply_to: UsageRequested(
            reply_to=reply_to, tenant=tenant, since=since, until=until, by=by
        ),
    )
    if found is None:
        raise TransientError("no process counts usage")
    data: list[Any] = [
        msgspec.to_builtins(row) | {"total_tokens": row.total_tokens} for row in found.rows
    ]
    return msgspec.json.encode({"object": "list", "counts_since": found.counts_since, "data": data})


def named_tenant(
    gateway: Gateway, headers: Mapping[str, str], peer: str | None, query: Mapping[str, str]
) -> TenantId | None:
    """
    The tenant that a question is about: the caller's, or the one that the parameter `tenant` names;
    None for `*`, which is all tenants.

    Raises:
        ContractError: The key is not valid, or has not the scope `operator` for other tenants.
    """
    caller = gateway.tenants.caller(authorization(headers), headers=headers, peer=peer)
    named = query.get("tenant")
    if named is None or named == caller.tenant:
        return caller.tenant
    if Scope.OPERATOR not in caller.scopes:
        # As if the other tenant did not exist: the answer must not reveal its name.
        raise ContractError(
            f"tenant {named[:128]!r} does not exist", code="tenant_not_found", status=404
        )
    return None if named == "*" else TenantId(named)


def time_of(query: Mapping[str, str], name: str, now: UnixTime) -> UnixTime | None:
    """
    The time that a parameter names; None without the parameter.

    Raises:
        ContractError: It is not a time.
    """
    text = query.get(name)
    return None if text is None else parse_time(text, now, param=name)
