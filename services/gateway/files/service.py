"""Uploads, lists, reads and deletes files of a tenant."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial

import structlog

from services.gateway.body import RequestBody, declared_bytes
from services.gateway.files.form import (
    MAX_FORM_BYTES,
    Field,
    FileBegin,
    form_boundary,
    form_events,
)
from services.gateway.files.objects import (
    MAX_FILENAME_CHARS,
    Page,
    UploadFields,
    parse_fields,
)
from services.gateway.state import usable
from shared.contracts.base import TenantId
from shared.contracts.errors import (
    CapacityError,
    ContractError,
    MeshError,
    StoreUnavailableError,
)
from shared.store.bodies import BodyWriter, MissingBodyError
from shared.store.files import StoredFile, Totals
from shared.store.ids import is_file_id, new_file_id
from shared.store.settings import StoreSettings
from shared.store.store import Store
from solver.storage.quota import Excess, Use, excess
from solver.storage.retention import expires_at

log = structlog.get_logger()

UPLOAD_RETRY_AFTER_S = 2.0


class Files:
    """
    Files of all tenants; each method sees those of one.

    Args:
        store: The store; None if none is configured.
        settings: Limits and retention.
        idle_s: Longest time for which an upload may send nothing.
    """

    def __init__(self, store: Store | None, settings: StoreSettings, *, idle_s: float) -> None:
        self._store = store
        self._settings = settings
        self._idle_s = idle_s
        self._num_uploads = 0

    async def upload(
        self, tenant: TenantId, headers: Mapping[str, str], receive: object
    ) -> StoredFile:
        """
        Store the file of a form. Its body is complete and in its place before the row exists.

        Args:
            tenant: Tenant that owns the file.
            headers: Headers of the request, names in lower case.
            receive: The `receive` of ASGI; the body has not been read.

        Raises:
            ContractError: The form or a field is invalid, or the file exceeds a limit.
            CapacityError: This gateway has too many uploads in progress.
            StoreFullError: The disk is full.
            StoreUnavailableError: The store cannot be used now. If it failed at the end, the file
                may be stored.
        """
        body = RequestBody(receive, idle_s=self._idle_s)
        try:
            with self._slot():
                return await self._upload(tenant, headers, body)
        except MeshError:
            await body.discard()
            raise

    async def get(self, tenant: TenantId, file_id: str) -> StoredFile:
        """
        The tenant's file.

        Raises:
            ContractError: The tenant has no such file (status 404).
            StoreUnavailableError: The store cannot be used now.
        """
        rows = self._usable().files
        file = await rows.get(tenant, file_id) if is_file_id(file_id) else None
        if file is None:
            raise _not_found(file_id)
        return file

    async def page(self, tenant: TenantId, page: Page) -> tuple[list[StoredFile], bool]:
        """
        A page of the tenant's files, and whether there are more.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        return await self._usable().files.page(
            tenant, limit=page.limit, order=page.order, after=page.after, purpose=page.purpose
        )

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """
        The blocks of a file.

        Raises:
            ContractError: The body is lost (status 410).
            StoreUnavailableError: The store cannot be used now.
        """
        store = self._usable()
        try:
            async for block in store.bodies.read(file.body):
                yield block
        except MissingBodyError:
            await store.require_bodies()
            raise ContractError(
                f"the content of file {file.id} is lost; upload it again",
                code="file_lost",
                param="file_id",
                status=410,
            ) from None

    async def delete(self, tenant: TenantId, file_id: str) -> None:
        """
        Delete the tenant's file. After a crash in the middle, the sweep removes the body.

        Raises:
            ContractError: The tenant has no such file (status 404), or a batch reads it (409).
            StoreUnavailableError: The store cannot be used now.
        """
        store = self._usable()
        if await store.batches.reads(tenant, file_id):
            raise ContractError(
                f"a batch reads file {file_id}: delete it when the batch has ended",
                code="file_in_use",
                param="file_id",
                status=409,
            )
        file = await store.files.remove(tenant, file_id) if is_file_id(file_id) else None
        if file is None:
            raise _not_found(file_id)
        try:
            await store.bodies.remove(file.body)
        except StoreUnavailableError as error:
            log.warning("body.left", file_id=file_id, error=str(error))

    async def _upload(
        self, tenant: TenantId, headers: Mapping[str, str], body: RequestBody
    ) -> StoredFile:
        store = self._usable()
        boundary = form_boundary(headers.get("content-type"))
        now, totals = await store.files.totals(tenant)
        least_bytes = max(0, declared_bytes(headers) - MAX_FORM_BYTES)
        self._check_size(least_bytes)
        self._admit(tenant, totals, num_bytes=least_bytes)
        try:
            async with (
                asyncio.timeout(self._settings.upload_timeout_s),
                store.bodies.upload(new_file_id(now)) as writer,
            ):
                filename, fields = await self._receive(tenant, totals, writer, body, boundary)
                await writer.commit()
        except TimeoutError:
            raise ContractError(
                f"the upload took longer than {self._settings.upload_timeout_s:g} s",
                code="body_timeout",
                status=408,
            ) from None
        file = StoredFile(
            id=writer.body.rpartition("/")[2],
            tenant=tenant,
            purpose=fields.purpose,
            filename=filename,
            num_bytes=writer.num_bytes,
            sha256=writer.sha256,
            created_at=now,
            expires_at=expires_at(
                now,
                requested_s=fields.expires_after_s,
                kept_s=self._settings.retention_of(tenant, fields.purpose),
            ),
            body=writer.body,
        )
        try:
            await store.files.add(file, partial(self._admit, tenant, num_bytes=file.num_bytes))
        except ContractError:
            await store.bodies.remove(file.body)
            raise
        # After another error the row may exist, so the sweep decides about the body.
        return file

    async def _receive(
        self,
        tenant: TenantId,
        totals: Totals,
        writer: BodyWriter,
        body: RequestBody,
        boundary: str,
    ) -> tuple[str, UploadFields]:
        """Write the form's file; return its name and the fields."""
        filename, fields = "", dict[str, str]()
        async with aclosing(form_events(body, boundary)) as events:
            async for event in events:
                match event:
                    case Field():
                        fields[event.name] = event.value
                    case FileBegin():
                        filename = _checked_filename(event.filename)
                    case _:
                        num_bytes = writer.num_bytes + len(event)
                        self._check_size(num_bytes)
                        self._admit(tenant, totals, num_bytes=num_bytes)
                        await writer.write(event)
        return filename, parse_fields(fields)

    def _usable(self) -> Store:
        return usable(self._store)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Context of one upload in progress."""
        limit = self._settings.max_uploads
        if self._num_uploads >= limit:
            raise CapacityError(
                f"this gateway has {limit} uploads in progress, which is its limit",
                retry_after_s=UPLOAD_RETRY_AFTER_S,
                status=503,
            )
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    def _check_size(self, num_bytes: int) -> None:
        limit = self._settings.max_file_bytes
        if num_bytes > limit:
            raise ContractError(
                f"the file is too large: the limit is {limit} bytes (store.max_file_bytes)",
                code="file_too_large",
                param="file",
                status=413,
            )

    def _admit(self, tenant: TenantId, totals: Totals, *, num_bytes: int) -> None:
        limits = self._settings.limits_of(tenant)
        found = excess(
            Use(totals.num_files, totals.num_bytes),
            Use(limits.max_files, limits.max_bytes),
            added_bytes=num_bytes,
        )
        if found is not None:
            raise _over_quota(tenant, found)


def _over_quota(tenant: TenantId, found: Excess) -> ContractError:
    what, status = ("files", 429) if found.limit == "max_files" else ("bytes of files", 413)
    return ContractError(
        f"tenant {tenant} may store {found.allowed} {what} (store.limits.{found.limit}) and has "
        f"{found.used}: delete files first",
        code="quota_exceeded",
        param="file",
        status=status,
    )


def _not_found(file_id: str) -> ContractError:
    return ContractError(
        f"no such file: {file_id[:64]}", code="file_not_found", param="file_id", status=404
    )


def _checked_filename(name: str) -> str:
    """
    Check the name of an uploaded file, which is stored as given and names nothing on disk.

    Raises:
        ContractError: It is empty or too long, or has control characters.
    """
    if not 1 <= len(name) <= MAX_FILENAME_CHARS or not name.isprintable():
        raise ContractError(
            f"the filename must have 1 to {MAX_FILENAME_CHARS} printable characters", param="file"
        )
    return name
