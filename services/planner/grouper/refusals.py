"""Refusal of a request: an error final, followed by a copy to the dead letters."""

from http import HTTPStatus

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage
from shared.broker.retry import publish_until_routed
from shared.contracts.errors import CapacityError, ContractError, MeshError
from shared.contracts.requests import ErrorInfo
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
