"""ASGI application of `/v1/files`, beside the application of a front."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote
from uuid import uuid4

import msgspec
import structlog
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException

from services.gateway.channel import Channel
from services.gateway.door import authorization
from services.gateway.errors import error_info
from services.gateway.exchange import MESH_REQUEST_ID
from services.gateway.files.objects import (
    FileDeleted,
    file_list,
    file_object,
    parse_page,
)
from services.gateway.files.service import Files
from services.gateway.headers import REQUEST_ID, parse_hints
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.state import Gateway
from shared.contracts.base import TenantId
from shared.contracts.errors import MeshError, TransientError

log = structlog.get_logger()

ROOT = "/v1/files"
ENDPOINT = "files"
"""Label of metrics."""


class ContentBrokenError(MeshError):
    """A body ended or failed after its begin was sent; the connection is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of the Files API."""

    tenant: TenantId
    headers: Mapping[str, str]
    query: Mapping[str, str]
    file_id: str
    receive: Any
    channel: Channel

    async def answer(self, body: msgspec.Struct) -> Outcome:
        """Send a JSON object."""
        await self.channel.json(msgspec.json.encode(body))
        return Outcome.COMPLETED


Handler = Callable[[Call], Awaitable[Outcome]]


class WithFiles:
    """
    ASGI application that serves `/v1/files` itself, and passes all else to *front*.

    Args:
        gateway: Components that all requests share.
        front: Application of the front.
    """

    def __init__(self, gateway: Gateway, front: Any) -> None:
        self._gateway = gateway
        self._front = front
        settings = gateway.settings
        self._files = Files(gateway.store, settings.store, idle_s=settings.body_timeout_s)
        self._routes: Mapping[tuple[int, str], Mapping[str, Handler]] = {
            (0, ""): {"GET": self._list, "POST": self._upload},
            (1, ""): {"GET": self._get, "DELETE": self._delete},
            (2, "content"): {"GET": self._content},
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == ROOT or path.startswith(f"{ROOT}/")):
            await self._front(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        request_id = f"req-{uuid4().hex}"
        own = {MESH_REQUEST_ID: request_id}
        if client_id := headers.get(REQUEST_ID):
            own[REQUEST_ID] = client_id
        channel = Channel(send, own)
        logged = log.bind(request_id=request_id, endpoint=ENDPOINT)
        outcome = Outcome.CANCELLED
        try:
            outcome = await self._answered(scope, receive, headers, channel)
        except (MeshError, HTTPException) as error:
            info = error_info(error)
            outcome = outcome_of(info)
            logged.info("request.refused", code=info.code, status=info.status, error=str(error))
            if channel.started:
                # The missing rest makes the server close the connection.
                return
            await channel.error(info)
        except Exception as error:  # a bug: the client gets an answer, the log the rest
            outcome = Outcome.FAILED
            logged.exception("request.broken")
            if channel.started:
                raise
            await channel.error(error_info(error))
        finally:
            self._gateway.metrics.requests.labels(ENDPOINT, outcome.value).inc()

    async def _answered(
        self, scope: dict[str, Any], receive: Any, headers: Mapping[str, str], channel: Channel
    ) -> Outcome:
        gateway = self._gateway
        if gateway.stop.is_set():
            raise TransientError("this gateway is shutting down")
        tenant = gateway.tenants.authenticate(authorization(headers))
        tenant = gateway.tenants.effective(tenant, parse_hints(headers))
        parts = scope["path"].removeprefix(ROOT).strip("/").split("/")
        parts = [] if parts == [""] else parts
        file_id, rest = (parts[0] if parts else ""), "/".join(parts[1:])
        methods = self._routes.get((len(parts), rest))
        if methods is None:
            raise NotFoundException
        handler = methods.get(scope["method"])
        if handler is None:
            raise MethodNotAllowedException
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        with gateway.tenants.slot(tenant):
            return await handler(
                Call(
                    tenant=tenant,
                    headers=headers,
                    query=query,
                    file_id=file_id,
                    receive=receive,
                    channel=channel,
                )
            )

    async def _upload(self, call: Call) -> Outcome:
        file = await self._files.upload(call.tenant, call.headers, call.receive)
        log.info("file.stored", file_id=file.id, tenant=file.tenant, num_bytes=file.num_bytes)
        return await call.answer(file_object(file))

    async def _list(self, call: Call) -> Outcome:
        files, has_more = await self._files.page(call.tenant, parse_page(call.query))
        return await call.answer(file_list(files, has_more=has_more))

    async def _get(self, call: Call) -> Outcome:
        return await call.answer(file_object(await self._files.get(call.tenant, call.file_id)))

    async def _delete(self, call: Call) -> Outcome:
        await self._files.delete(call.tenant, call.file_id)
        return await call.answer(FileDeleted(id=call.file_id))

    async def _content(self, call: Call) -> Outcome:
        file = await self._files.get(call.tenant, call.file_id)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(file.num_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        num_sent = 0
        left = asyncio.create_task(_disconnected(call.receive), name=f"reader of {file.id}")
        try:
            async with aclosing(self._files.content(file)) as blocks:
                async for block in blocks:
                    if left.done():
                        return Outcome.CANCELLED
                    if not call.channel.started:
                        await call.channel.begin(headers=headers)
                    num_sent += len(block)
                    await call.channel.part(block)
        finally:
            left.cancel()
        if num_sent != file.num_bytes:
            raise ContentBrokenError(f"{file.body} has {num_sent} of {file.num_bytes} bytes")
        if not call.channel.started:
            await call.channel.begin(headers=headers)
        await call.channel.end()
        return Outcome.COMPLETED


async def _disconnected(receive: Any) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
