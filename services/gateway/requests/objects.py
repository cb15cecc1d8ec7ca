"""The object `request` of the HTTP interface."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw

from services.gateway.errors import error_fields
from services.gateway.results import headway_of, with_headway
from shared.api.calls import ENDPOINTS
from shared.api.events import response_of_stream
from shared.contracts.base import UnixTime, encode
from shared.contracts.requests import RequestCompleted
from shared.store.requests.records import StoredRequest
from shared.store.requests.status import final_of, state_of


class RequestObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored request; times are Unix seconds."""

    id: str
    object: Literal["request"] = "request"
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    endpoint: str | None
    model: str | None
    created_at: UnixTime
    grouped_at: UnixTime | None
    """Time since which a queue of the mesh has the request."""
    lane: str | None
    """Queue of the mesh that the request was put into."""
    expected_at: UnixTime | None
    """Time at which service was expected to begin, when the request was put into its queue."""
    started_at: UnixTime | None
    """Begin of the last run."""
    instance: str | None
    """Instance of that run."""
    attempts: int
    """Number of runs."""
    ended_at: UnixTime | None
    expires_at: UnixTime
    """Time after which the request and its answer are deleted."""
    result: Raw | None = None
    """The answer, as a client gets it that waits for it."""
    error: dict[str, Any] | None = None
    """The error in OpenAI's form, if the request has failed or was cancelled."""
    headway: dict[str, Any] | None = None


class RequestDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of a deletion."""

    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True


def request_object(row: StoredRequest) -> RequestObject:
    """
    A row as an object.

    Raises:
        ContractError: A newer version of Headway wrote a final that this one cannot read.
    """
    final = final_of(row)
    fields: dict[str, Any] = {}
    if isinstance(final, RequestCompleted):
        fields = {"result": Raw(result_of(final, row.endpoint)), "headway": headway_of(final)}
    elif final is not None:
        fields = {"error": error_fields(final.error)}
    return RequestObject(
        id=row.id,
        status=state_of(row).value,
        endpoint=row.endpoint,
        model=row.model,
        created_at=row.created_at,
        grouped_at=row.grouped_at,
        lane=row.lane,
        expected_at=row.expected_at,
        started_at=row.started_at,
        instance=row.instance_id,
        attempts=row.runs,
        ended_at=row.ended_at,
        expires_at=row.expires_at,
        **fields,
    )


def result_of(final: RequestCompleted, path: str | None) -> bytes:
    """
    JSON of an answer.

    Args:
        final: The final of the request.
        path: Endpoint of the request; None if the store does not know it.

    Returns:
        The body that a client of the endpoint gets; for a request of which only text and tokens are
        known, the final as producers get it.
    """
    response = b"" if final.response is UNSET else bytes(final.response)
    events = b"".join(step.events for step in final.details)
    if response in (b"", b"null") and events and path in ENDPOINTS:
        response = response_of_stream(path, events)
    return with_headway(response, final) if response else encode(final)
