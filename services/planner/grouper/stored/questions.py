"""Answers questions about stored requests."""

from dataclasses import dataclass

import structlog

from services.planner.settings import GrouperSettings
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement
from shared.broker.retry import send_best_effort
from shared.contracts.base import Decoder, TenantId
from shared.contracts.errors import ContractError, StoreFullError, StoreUnavailableError
from shared.contracts.requests import ErrorInfo
from shared.contracts.stored import RequestAsked, RequestStatus
from shared.store.requests.status import status_of
from shared.store.store import Store

log = structlog.get_logger()
_decode: Decoder[RequestAsked] = Decoder(RequestAsked)

NO_STORE = ErrorInfo(
    message="this planner has no store: set store.data_dir or store.url",
    code="store_not_configured",
    type="server_error",
    status=501,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """
    Handler of the queue `headway.questions`, which all groupers consume.

    Args:
        broker: The broker.
        store: The store; None if none is configured.
        settings: Users that may ask about other tenants, and the tenant without a user.
    """

    broker: Broker
    store: Store | None
    settings: GrouperSettings

    async def on_question(self, delivery: Delivery) -> None:
        """Answer a question, as far as the store can be used now."""
        try:
            asked = _decode(delivery.body)
        except ContractError as error:
            log.warning("question.unreadable", error=str(error))
        else:
            answer = await self._answer(asked, self._tenant(delivery, asked))
            out = OutMessage.transient(answer, correlation_id=asked.request_id)
            await send_best_effort(self.broker, topology.REPLIES, asked.reply_to, out)
        await delivery.settle(Settlement.ACK)

    def _tenant(self, delivery: Delivery, asked: RequestAsked) -> TenantId:
        user = delivery.user_id
        named = asked.tenant if user in self.settings.trusted_users else None
        return TenantId(named or user or self.settings.anonymous_tenant)

    async def _answer(self, asked: RequestAsked, tenant: TenantId) -> RequestStatus:
        request_id = asked.request_id
        if self.store is None:
            return RequestStatus(request_id=request_id, problem=NO_STORE)
        try:
            self.store.require()
            row = await self.store.requests.get(tenant, request_id)
        except (StoreUnavailableError, StoreFullError) as error:
            problem = ErrorInfo(
                message=f"the store cannot be used now: {error}",
                code="store_unavailable",
                type="server_error",
                status=503,
            )
            return RequestStatus(request_id=request_id, problem=problem)
        if row is None:
            problem = ErrorInfo(
                message=f"tenant {tenant} has no request {request_id}",
                code="request_not_found",
                param="request_id",
                status=404,
            )
            return RequestStatus(request_id=request_id, problem=problem)
        return status_of(row)
