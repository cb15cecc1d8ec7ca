"""Requests whose answers are collected later (`Prefer: respond-async`)."""

import contextlib
from typing import Any

import msgspec

from services.gateway.call import Call
from services.gateway.headers import IDEMPOTENCY_KEY, RESPOND_ASYNC
from services.gateway.pass_through import JSON, published
from services.gateway.requests.objects import RequestObject, request_object
from services.gateway.state import Gateway
from shared.contracts.base import RequestId, TenantId
from shared.contracts.errors import (
    ContractError,
    MeshError,
    StoreFullError,
    StoreUnavailableError,
)
from shared.contracts.ingress import CallRequest
from shared.producer.outstanding import ID_CONFLICT
from shared.store.requests.records import Asked, StoredRequest
from shared.store.store import Store
from shared.tracing.context import TraceContext

LOCATION = "/v1/requests/{}"


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request that is not waited for."""

    body: RequestObject

    @property
    def status(self) -> int:
        """202, or 200 for a repeat of a request that has ended."""
        return 202 if self.body.ended_at is None else 200

    @property
    def headers(self) -> dict[str, str]:
        return {
            "location": LOCATION.format(self.body.id),
            "preference-applied": RESPOND_ASYNC,
        }


async def accept(
    gateway: Gateway,
    body: CallRequest,
    *,
    endpoint: str,
    digest: str,
    trace: TraceContext | None,
) -> Accepted:
    """
    Store that a request was asked, and publish it; the store alone gets its final.

    A repeat of an id publishes again what no queue has yet: the gateway that got it first may have
    ended in between.

    Args:
        gateway: Components that all requests share.
        body: The request, with its id and tenant.
        endpoint: Path of the HTTP request.
        digest: Digest of what is asked.
        trace: W3C's trace context.

    Raises:
        ContractError: Another request has the id, or no store is configured.
        CapacityError: The mesh is full; the id is free.
        TransientError: The store or the broker cannot be used now.
    """
    store = gateway.usable_store()
    asked = Asked(
        tenant=TenantId(body.tenant or ""),
        request_id=RequestId(body.id or ""),
        digest=digest,
        endpoint=endpoint,
        model=body.model or "",
        kept_s=gateway.settings.store.finals_kept_s,
    )
    (is_new,) = await store.requests.ask([asked])
    row = await _row(store, asked)
    if row.grouped_at is None and row.final is None:
        try:
            await gateway.producer.publish_stored(body, digest=digest, trace=trace)
        except MeshError:
            if is_new:
                with contextlib.suppress(StoreUnavailableError, StoreFullError):
                    await store.requests.withdraw(asked.key)
            raise
    return Accepted(body=request_object(row))


async def _row(store: Store, asked: Asked) -> StoredRequest:
    row = await store.requests.get(asked.tenant, asked.request_id)
    if row is None:
        raise StoreUnavailableError("the request was deleted meanwhile")
    if row.digest != asked.digest:
        raise ContractError(
            "another request has this id", code=ID_CONFLICT, param=IDEMPOTENCY_KEY, status=409
        )
    return row


class Deferred:
    """
    Accepts bodies as calls whose answers are collected later.

    Args:
        gateway: Components that all requests share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, call: Call, endpoint: str, receive: Any, send: Any) -> None:
        """
        Answer one request, whose body is the first ASGI event.

        Raises:
            MeshError: The request is not accepted.
        """
        if call.stream:
            raise ContractError(
                f"stream must be false with Prefer: {RESPOND_ASYNC}: the answer is not sent but "
                "stored",
                param="stream",
            )
        body = (await receive())["body"]
        accepted = await accept(
            self._gateway,
            published(call, endpoint, body),
            endpoint=endpoint,
            digest=call.digest or "",
            trace=call.trace,
        )
        headers = [(name.encode(), value.encode()) for name, value in accepted.headers.items()]
        start = {"type": "http.response.start", "status": accepted.status}
        await send({**start, "headers": [JSON, *headers]})
        await send({"type": "http.response.body", "body": msgspec.json.encode(accepted.body)})
