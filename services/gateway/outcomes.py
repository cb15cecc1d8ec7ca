"""Outcomes of requests, used as a label of metrics and logs."""

from enum import Enum
from http import HTTPStatus

from shared.contracts.requests import ErrorInfo


class Outcome(Enum):
    """Values of the label `outcome`: outcomes of HTTP requests."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The request or its tenant caused the error (status 4xx)."""
    UNAVAILABLE = "unavailable"
    """The mesh is unreachable, or no instance serves the request (status 503)."""
    TIMEOUT = "timeout"
    """A deadline or time limit of the request passed (status 504)."""
    CANCELLED = "cancelled"
    """The client disconnected before the answer ended."""
    DIVERGED = "diverged"
    """A replayed run contradicted tokens that were already sent to the client."""
    FAILED = "failed"
    """Any other error that the request did not cause."""


_BY_STATUS: dict[int, Outcome] = {
    HTTPStatus.SERVICE_UNAVAILABLE: Outcome.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: Outcome.TIMEOUT,
}


def outcome_of(info: ErrorInfo) -> Outcome:
    """Outcome of a request whose answer is an error."""
    match info.code:
        case "cancelled":
            return Outcome.CANCELLED
        case "run_diverged":
            return Outcome.DIVERGED
    if info.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.REFUSED
    return _BY_STATUS.get(info.status, Outcome.FAILED)
