"""Errors in OpenAI's format: `{"error": {message, type, param, code}}`."""

from http import HTTPStatus
from math import ceil
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from services.gateway.headers import IDEMPOTENCY_KEY
from services.gateway.rate_limits import headers_of
from shared.contracts.errors import (
    BrokerConflictError,
    CapacityError,
    ContractError,
    ModelNotReadyError,
    StoreFullError,
    StoreUnavailableError,
    TransientError,
)
from shared.contracts.requests import ErrorInfo
from shared.contracts.tenants.policies import QUOTA_SPENT
from shared.producer.generation import RunDivergedError
from shared.producer.outstanding import ID_CONFLICT

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 500: "api_error"}
BROKER_RETRY_AFTER_S = 5.0
MODEL_RETRY_AFTER_S = 1.0
STORE_RETRY_AFTER_S = 5.0
INTERNAL_ERROR = "internal_error"
CONFLICT = (
    f"another request has this {IDEMPOTENCY_KEY}: a repeat must have the same path and body; use a "
    "new key for another request"
)
"""
Message about an id that another request has: only ids that a gateway makes of a client's key can be
used again.
"""


def type_for(status: int) -> str:
    """OpenAI's error `type` for an HTTP status code."""
    if status in TYPES:
        return TYPES[status]
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def error_info(error: Exception) -> ErrorInfo:
    """Error information for the client; unexpected errors get no description."""
    match error:
        case ContractError():
            return ErrorInfo(
                message=str(error), code=error.code, param=error.param, status=error.status
            )
        case CapacityError():
            return ErrorInfo(
                message=str(error),
                code="over_capacity",
                status=error.status,
                retry_after_s=error.retry_after_s,
            )
        case TransientError() | BrokerConflictError() | StoreFullError():
            return _unavailable_info(error)
        case RunDivergedError():
            return ErrorInfo(message=str(error), code=error.code, status=502)
        case HTTPException():
            phrase = HTTPStatus(error.status_code).phrase
            return ErrorInfo(
                message=error.detail or phrase,
                code=phrase.lower().replace(" ", "_"),
                status=error.status_code,
            )
        case _:
            return ErrorInfo(
                message="internal error of the gateway; see its log",
                code=INTERNAL_ERROR,
                status=500,
            )


def _unavailable_info(error: TransientError | BrokerConflictError | StoreFullError) -> ErrorInfo:
    if isinstance(error, StoreFullError):
        return ErrorInfo(message=f"{error}; nothing was stored", code="store_full", status=507)
    if isinstance(error, StoreUnavailableError):
        return ErrorInfo(
            message=f"the store cannot be used now: {error}",
            code="store_unavailable",
            status=503,
            retry_after_s=STORE_RETRY_AFTER_S,
        )
    if isinstance(error, ModelNotReadyError):
        return ErrorInfo(
            message=str(error),
            code="model_not_ready",
            param="model",
            status=503,
            retry_after_s=MODEL_RETRY_AFTER_S,
        )
    return ErrorInfo(
        message=f"the mesh cannot be reached: {error}",
        code="mesh_unavailable",
        status=503,
        retry_after_s=BROKER_RETRY_AFTER_S,
    )


def type_of(info: ErrorInfo) -> str:
    """OpenAI's error `type`: a spent budget has its own."""
    return QUOTA_SPENT if info.code == QUOTA_SPENT else type_for(info.status)


def error_fields(info: ErrorInfo) -> dict[str, Any]:
    """Fields of *info* in OpenAI's form."""
    is_conflict = info.code == ID_CONFLICT
    return {
        "message": CONFLICT if is_conflict else info.message,
        "type": type_of(info),
        "param": IDEMPOTENCY_KEY if is_conflict else info.param,
        "code": info.code,
    }


def error_body(info: ErrorInfo) -> bytes:
    """JSON of *info* with all its fields, also used for SSE error events."""
    return msgspec.json.encode({"error": error_fields(info)})


def anthropic_error_body(info: ErrorInfo) -> bytes:
    """JSON of *info* in the format of Anthropic's API."""
    kind = ANTHROPIC_TYPES.get(info.status) or type_for(info.status)
    message = error_fields(info)["message"]
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def error_headers(info: ErrorInfo) -> dict[str, str]:
    """
    Header `retry-after` in whole seconds, at least 1, if *info* has a retry delay, and the headers
    about the tenant's limits, if it is about one.
    """
    headers = headers_of({"requests": info.requests_limit, "tokens": info.tokens_limit})
    if info.retry_after_s is not None:
        headers["retry-after"] = str(max(1, ceil(info.retry_after_s)))
    return headers
