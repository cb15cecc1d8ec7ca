"""The Batch API as a kind of stored objects."""

import msgspec
import structlog

from services.gateway.batches.objects import (
    BatchRequest,
    batch_list,
    batch_object,
    parse_page,
    parse_request,
    window_s,
)
from services.gateway.outcomes import Outcome
from services.gateway.resources import ResourceCall, Routes
from services.gateway.state import Gateway
from shared.contracts.base import TenantId
from shared.contracts.errors import ContractError
from shared.contracts.tenants.keys import Scope
from shared.store.files import LOST, StoredFile
from shared.store.ids import is_batch_id, new_batch_id
from shared.store.objects.batches import BatchStatus, StoredBatch
from shared.store.store import Store

log = structlog.get_logger()

MAX_BODY_BYTES = 64 * 1024
PURPOSE = "batch"


class BatchesResource:
    """
    Answers requests to `/v1/batches`; a runner, of this gateway or another one, does the work.

    Args:
        gateway: Components that all requests share.
    """

    root = "/v1/batches"
    name = "batches"
    scope = Scope.BATCHES

    def __init__(self, gateway: Gateway) -> None:
        self._settings = gateway.settings
        self._gateway = gateway
        self.routes: Routes = {
            "": {"GET": self._list, "POST": self._create},
            "{id}": {"GET": self._get},
            "{id}/cancel": {"POST": self._cancel},
        }

    async def _create(self, call: ResourceCall) -> Outcome:
        store = self._store()
        asked = parse_request(await call.body(limit=MAX_BODY_BYTES))
        length_s = window_s(asked.completion_window)
        now = await store.database.time()
        file = await self._input(store, call.tenant, asked, ends_at=now + length_s)
        batch = StoredBatch(
            id=new_batch_id(now),
            tenant=call.tenant,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            input_body=file.body,
            completion_window=asked.completion_window,
            slo=None if asked.slo is None else msgspec.json.encode(asked.slo).decode(),
            metadata=(
                None if asked.metadata is None else msgspec.json.encode(asked.metadata).decode()
            ),
            output_expires_s=(
                None if asked.output_expires_after is None else asked.output_expires_after.seconds
            ),
            created_at=now,
            expires_at=now + length_s,
        )
        await store.batches.add(batch)
        log.info("batch.created", batch_id=batch.id, tenant=batch.tenant, file_id=file.id)
        return await call.answer(batch_object(batch))

    async def _list(self, call: ResourceCall) -> Outcome:
        page = parse_page(call.query)
        batches, has_more = await self._store().batches.page(
            call.tenant, limit=page.limit, after=page.after
        )
        return await call.answer(batch_list(batches, has_more=has_more))

    async def _get(self, call: ResourceCall) -> Outcome:
        return await call.answer(batch_object(await self._found(call)))

    async def _cancel(self, call: ResourceCall) -> Outcome:
        await self._found(call)
        batch = await self._store().batches.cancel(call.tenant, call.object_id)
        if batch is None:
            raise _not_found(call.object_id)
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise ContractError(
                f"the batch is {batch.status.value} and cannot be cancelled",
                code="batch_not_cancellable",
                status=409,
            )
        log.info("batch.cancelling", batch_id=batch.id, tenant=batch.tenant)
        return await call.answer(batch_object(batch))

    async def _found(self, call: ResourceCall) -> StoredBatch:
        store, batch_id = self._store(), call.object_id
        batch = await store.batches.get(call.tenant, batch_id) if is_batch_id(batch_id) else None
        if batch is None:
            raise _not_found(batch_id)
        return batch

    async def _input(
        self, store: Store, tenant: TenantId, asked: BatchRequest, *, ends_at: float
    ) -> StoredFile:
        """
        The input file of a new batch.

        Raises:
            ContractError: The tenant has no such file, or it cannot be the input.
        """
        file = await store.files.get(tenant, asked.input_file_id)
        if file is None:
            raise ContractError(
                f"no such file: {asked.input_file_id}",
                code="file_not_found",
                param="input_file_id",
                status=404,
            )
        limit, problem = self._settings.batches.max_file_bytes, None
        if file.purpose != PURPOSE:
            problem = f"has the purpose {file.purpose!r}; upload it with the purpose {PURPOSE!r}"
        elif file.status == LOST:
            problem = "is lost: upload it again"
        elif file.num_bytes > limit:
            problem = f"has {file.num_bytes} bytes; the limit is {limit} (batches.max_file_bytes)"
        elif file.expires_at is not None and file.expires_at < ends_at:
            problem = "expires before the completion window ends"
        if problem is not None:
            raise ContractError(f"file {file.id} {problem}", param="input_file_id")
        return file

    def _store(self) -> Store:
        return self._gateway.usable_store()


def _not_found(batch_id: str) -> ContractError:
    return ContractError(
        f"no such batch: {batch_id[:80]}", code="batch_not_found", param="batch_id", status=404
    )
