"""Refusal of a request: an error final, followed by a copy to the dead letters."""

from http import HTTPStatus

from shared.broker.dead_letters import copy_of, dead_letter
from shared.broker.protocol import Broker, Delivery
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


async def dead_letter_refused(broker: Broker, delivery: Delivery, info: ErrorInfo) -> None:
    """
    Copy a refused message to the dead letters, with the reason in its error final.

    Raises:
        BrokerUnavailableError: The broker remained unavailable during all retries.
    """
    reason = f"{info.code}: {info.message}"
    await dead_letter(broker, copy_of(delivery), queue=delivery.queue, reason=reason)
