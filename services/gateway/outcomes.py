"""Outcomes of requests, as a label for metrics and logs."""

from enum import Enum
from http import HTTPStatus

from shared.contracts.requests import ErrorInfo


class Outcome(Enum):
    """The label `outcome`."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Error of the request or its tenant: 4xx."""
    UNAVAILABLE = "unavailable"
    """The mesh is unreachable, or no instance serves the request: 503."""
    TIMEOUT = "timeout"
    """A deadline passed: 504."""
    CANCELLED = "cancelled"
    """The client disconnected."""
    DIVERGED = "diverged"
    """A replayed run contradicted tokens that the client already had."""
    FAILED = "failed"
    """Any other error that the request did not cause."""


_BY_STATUS: dict[int, Outcome] = {
    HTTPStatus.SERVICE_UNAVAILABLE: Outcome.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: Outcome.TIMEOUT,
}


def outcome_of(info: ErrorInfo) -> Outcome:
    """Outcome of an error answer."""
    match info.code:
        case "cancelled":
            return Outcome.CANCELLED
        case "run_diverged":
            return Outcome.DIVERGED
    if info.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.REFUSED
    return _BY_STATUS.get(info.status, Outcome.FAILED)
