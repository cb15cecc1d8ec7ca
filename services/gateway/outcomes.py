"""How requests end, in one word for metrics and logs."""

from enum import Enum
from http import HTTPStatus

from shared.contracts.requests import ErrorInfo


class Outcome(Enum):
    """The label `outcome`."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The request's fault or its tenant's: 4xx."""
    UNAVAILABLE = "unavailable"
    """The mesh could not be reached, or has nobody to serve it: 503."""
    TIMEOUT = "timeout"
    """A deadline passed: 504."""
    CANCELLED = "cancelled"
    """The client left."""
    DIVERGED = "diverged"
    """A replayed run contradicted what the client already had."""
    FAILED = "failed"
    """Anything else that is not the request's fault."""


_BY_STATUS: dict[int, Outcome] = {
    HTTPStatus.SERVICE_UNAVAILABLE: Outcome.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: Outcome.TIMEOUT,
}


def outcome_of(info: ErrorInfo) -> Outcome:
    """The outcome that an error answer means."""
    match info.code:
        case "cancelled":
            return Outcome.CANCELLED
        case "run_diverged":
            return Outcome.DIVERGED
    if info.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.REFUSED
    return _BY_STATUS.get(info.status, Outcome.FAILED)
