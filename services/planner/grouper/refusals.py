"""Refusal of a request: an error final, followed by a copy to the dead letters."""

from http import HTTPStatus

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome
from shared.broker.retry import publish_until_confirmed, publish_until_routed
from shared.contracts.base import RequestId, UnixTime, encode
from shared.contracts.errors import CapacityError, ContractError, MeshError
from shared.contracts.requests import ErrorInfo, HistoryEntry, RequestFailed
from shared.contracts.tenants.policies import QUOTA_SPENT, RateLimitedError


def error_info(error: MeshError) -> ErrorInfo:
    """Error information for the producer of a refused request."""
    if isinstance(error, ContractError):
        is_late = error.status == HTTPStatus.GATEWAY_TIMEOUT
        return ErrorInfo(
            message=str(error),
            type="timeout_error" if is_late else "invalid_request_error",
            code=error.code,
            param=error.param,
            status=error.status,
        )
    if isinstance(error, RateLimitedError):
        return ErrorInfo(
            message=str(error),
            type=QUOTA_SPENT if error.code == QUOTA_SPENT else "rate_limit_error",
            code=error.code,
            status=429,
            retry_after_s=error.retry_after_s,
            requests_limit=error.requests,
            tokens_limit=error.tokens,
        )
    if isinstance(error, CapacityError):
        return ErrorInfo(
            message=str(error),
            type="rate_limit_error",
            code="over_capacity",
            status=error.status,
            retry_after_s=error.retry_after_s,
        )
    return ErrorInfo(message=str(error), type="server_error", code="internal", status=500)


async def send_failure(
    broker: Broker,
    *,
    reply_to: str | None,
    request_id: RequestId,
    error: ErrorInfo,
    now: UnixTime,
    history: tuple[HistoryEntry, ...] = (),
) -> None:
    """
    Deliver an error final; if no reply queue is bound, it goes to `headway.unclaimed`.

    Raises:
        BrokerUnavailableError: The broker remained unavailable during all retries.
    """
    if reply_to is None:
        return
    message = OutMessage(
        body=encode(RequestFailed(request_id=request_id, error=error, at=now, history=history)),
        kind="request.failed.v1",
        message_id=f"{request_id}/failed",
        correlation_id=request_id,
    )
    outcome = await publish_until_confirmed(broker, topology.REPLIES, reply_to, message)
    if outcome is not PublishOutcome.CONFIRMED:
        await publish_until_routed(broker, topology.UNCLAIMED, reply_to, message)


async def dead_letter(broker: Broker, delivery: Delivery, *, reason: str) -> None:
    """
    Copy *delivery* to the dead letters, with the reason in the error final.

    Raises:
        BrokerUnavailableError: The broker remained unavailable during all retries.
    """
    await publish_until_routed(
        broker,
        topology.DEAD,
        delivery.queue,
        OutMessage(
            body=delivery.body,
            kind=delivery.kind,
            message_id=delivery.message_id,
            correlation_id=delivery.correlation_id,
            reply_to=delivery.reply_to,
            headers={topology.REASON_HEADER: reason[:500], "headway-queue": delivery.queue},
        ),
    )
