"""What is checked of a request before its body is read: key, headers, slot of the tenant, sizes."""

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from services.gateway.body import Forwarded, RequestBody, declared_bytes
from services.gateway.headers import Hints, headers_in, parse_hints
from services.gateway.settings import Settings
from services.gateway.state import Gateway
from shared.contracts.base import TenantId
from shared.contracts.errors import MeshError, TransientError
from shared.contracts.tenants.keys import Scope

INTERNAL = "headway.internal"
"""Key of the ASGI scope with an `Internal`, which only code of this process can set."""
ADMISSION = "headway.admission"
"""
Key of the ASGI scope with the `Admission` of a request whose body was read before, or with the
error for which the application refuses it; only code of this process can set it.
"""


@dataclass(frozen=True, slots=True)
class Internal:
    """A request that this process makes for a tenant, whose key was checked before."""

    tenant: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """An open request, which holds a slot of its tenant."""

    tenant: TenantId
    hints: Hints
    settings: Settings
    declared_bytes: int
    """Size of the body that the client announces; 0 if it announces none."""
    hold: Callable[[int], None]
    """As `BodyMemory.held`."""

    async def body(self, receive: Any, *, limit: int | None = None) -> bytes:
        """
        The whole body, without a byte order mark; nothing is read if the announced size exceeds a
        limit.

        Args:
            receive: The `receive` of ASGI.
            limit: Largest size in bytes; None: that of calls.

        Raises:
            ContractError: The body is too large or too slow, or the client disconnected.
            CapacityError: Bodies take too much memory.
        """
        reader = RequestBody(receive, idle_s=self.settings.body_timeout_s)
        body = await reader.whole(
            self.settings.limits.max_body_bytes if limit is None else limit,
            declared_bytes=self.declared_bytes,
            hold=self.hold,
        )
        return body.removeprefix(BOM_UTF8)


@contextmanager
def admission(
    gateway: Gateway, scope: Mapping[str, Any], *, needs: Scope = Scope.INFERENCE
) -> Iterator[Admission]:
    """
    Context of an open request. Its body has not been read, except by `read_ahead`.

    Args:
        gateway: Components that all requests share.
        scope: ASGI scope of the request.
        needs: What the key must allow.

    Raises:
        TransientError: The gateway is shutting down.
        ContractError: The key or a header is invalid.
        CapacityError: All slots of the tenant are taken.
        MeshError: The error with which `read_ahead` could not read the body.
    """
    before = scope.get(ADMISSION)
    if isinstance(before, MeshError):
        raise before
    if before is not None:
        yield before
        return
    if gateway.stop.is_set():
        raise TransientError("this gateway is shutting down")
    tenants, headers, internal = gateway.tenants, headers_in(scope), scope.get(INTERNAL)
    if internal is None:
        tenant = tenants.authenticate(
            authorization(headers), headers=headers, peer=peer_of(scope), scope=needs
        )
    else:
        tenant = TenantId(internal.tenant)
    hints = parse_hints(headers)
    tenant = tenants.effective(tenant, hints)
    # The limit of internal requests is checked where they are made.
    slot = tenants.slot(tenant) if internal is None else tenants.counted(tenant)
    with slot, gateway.bodies.held(tenant) as hold:
        yield Admission(
            tenant=tenant,
            hints=hints,
            settings=gateway.settings,
            declared_bytes=declared_bytes(headers),
            hold=hold,
        )


@asynccontextmanager
async def read_ahead(
    gateway: Gateway, scope: Mapping[str, Any], receive: Any
) -> AsyncIterator[tuple[Forwarded, bytes]]:
    """
    Context of an open request whose body a layer reads before the application: the request for the
    application, and the body.

    The application takes no further slot. A request that is not admitted, or whose body cannot be
    read, has an empty body here; the application refuses it, in the form of its API.

    Args:
        gateway: Components that all requests share.
        scope: ASGI scope of the request.
        receive: The `receive` of ASGI.
    """
    body = b""
    result: Admission | MeshError
    with ExitStack() as held:
        try:
            result = held.enter_context(admission(gateway, scope))
            body = await result.body(receive)
        except MeshError as error:
            result = error
        yield Forwarded({**scope, ADMISSION: result}, receive, body), body


def peer_of(scope: Mapping[str, Any]) -> str | None:
    """Address of the other end of the connection of an ASGI request."""
    client = scope.get("client")
    return None if client is None else str(client[0])


def authorization(headers: Mapping[str, str]) -> str | None:
    """The header `Authorization`, or the key in Anthropic's header in its form."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")
