"""`/v1/requests`: the status and the answers of stored requests."""

import re

import structlog

from services.gateway.outcomes import Outcome
from services.gateway.requests.objects import RequestDeleted, request_object
from services.gateway.resources import ResourceCall, Routes
from services.gateway.state import Gateway
from shared.contracts.base import RequestId
from shared.contracts.errors import ContractError
from shared.contracts.tenants.keys import Scope
from shared.store.requests.records import StoredRequest

log = structlog.get_logger()
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestsResource:
    """
    Answers requests to `/v1/requests`.

    Args:
        gateway: Components that all requests share.
    """

    root = "/v1/requests"
    name = "requests"
    scope = Scope.INFERENCE

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.routes: Routes = {"{id}": {"GET": self._get, "DELETE": self._delete}}

    async def _get(self, call: ResourceCall) -> Outcome:
        return await call.answer(request_object(await self._row(call)))

    async def _delete(self, call: ResourceCall) -> Outcome:
        """Cancel a request in progress, or delete one that has ended."""
        row = await self._row(call)
        if row.final is None:
            await self._gateway.producer.cancel_stored(call.tenant, row.id)
            log.info("request.cancelled", cancelled=row.id, tenant=call.tenant)
            return await call.answer(request_object(row), status=202)
        await self._gateway.usable_store().requests.remove(call.tenant, [row.id])
        return await call.answer(RequestDeleted(id=row.id))

    async def _row(self, call: ResourceCall) -> StoredRequest:
        """
        The row of the request.

        Raises:
            ContractError: The tenant has no such request, or no store is configured.
            StoreUnavailableError: The store cannot be used now.
        """
        store = self._gateway.usable_store()
        row = None
        if _ID.fullmatch(call.object_id):
            row = await store.requests.get(call.tenant, RequestId(call.object_id))
        if row is None:
            raise ContractError(
                f"there is no request {call.object_id[:128]!r}",
                code="request_not_found",
                param="request_id",
                status=404,
            )
        return row
