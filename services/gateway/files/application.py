"""The Files API as a kind of stored objects."""

import asyncio
from contextlib import aclosing
from urllib.parse import quote

import structlog

from services.gateway.disconnect import disconnected
from services.gateway.files.objects import (
    FileDeleted,
    file_list,
    file_object,
    parse_page,
)
from services.gateway.files.service import Files
from services.gateway.outcomes import Outcome
from services.gateway.resources import ResourceCall, Routes
from services.gateway.state import Gateway
from shared.contracts.errors import MeshError
from shared.contracts.tenants.keys import Scope

log = structlog.get_logger()


class ContentBrokenError(MeshError):
    """A body ended or failed after its begin was sent; the connection is closed."""


class FilesResource:
    """
    Answers requests to `/v1/files`.

    Args:
        gateway: Components that all requests share.
    """

    root = "/v1/files"
    name = "files"
    scope = Scope.FILES

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        self._files = Files(gateway.store, settings.store, idle_s=settings.body_timeout_s)
        self.routes: Routes = {
            "": {"GET": self._list, "POST": self._upload},
            "{id}": {"GET": self._get, "DELETE": self._delete},
            "{id}/content": {"GET": self._content},
        }

    async def _upload(self, call: ResourceCall) -> Outcome:
        file = await self._files.upload(call.tenant, call.headers, call.receive)
        log.info("file.stored", file_id=file.id, tenant=file.tenant, num_bytes=file.num_bytes)
        return await call.answer(file_object(file))

    async def _list(self, call: ResourceCall) -> Outcome:
        files, has_more = await self._files.page(call.tenant, parse_page(call.query))
        return await call.answer(file_list(files, has_more=has_more))

    async def _get(self, call: ResourceCall) -> Outcome:
        return await call.answer(file_object(await self._files.get(call.tenant, call.object_id)))

    async def _delete(self, call: ResourceCall) -> Outcome:
        await self._files.delete(call.tenant, call.object_id)
        return await call.answer(FileDeleted(id=call.object_id))

    async def _content(self, call: ResourceCall) -> Outcome:
        file = await self._files.get(call.tenant, call.object_id)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(file.num_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        num_sent = 0
        left = asyncio.create_task(disconnected(call.receive), name=f"reader of {file.id}")
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
            await asyncio.wait({left})
        if num_sent != file.num_bytes:
            raise ContentBrokenError(f"{file.body} has {num_sent} of {file.num_bytes} bytes")
        if not call.channel.started:
            await call.channel.begin(headers=headers)
        await call.channel.end()
        return Outcome.COMPLETED
