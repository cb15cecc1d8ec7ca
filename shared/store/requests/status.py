"""Status of a stored request, as derived from its row."""

from msgspec import UNSET, Raw

from shared.contracts.base import Decoder, InstanceId
from shared.contracts.requests import Final
from shared.contracts.stored import RequestState, RequestStatus
from shared.store.requests.records import StoredRequest

_decode: Decoder[Final] = Decoder(Final)


def state_of(row: StoredRequest) -> RequestState:
    """How far the request has come."""
    if row.final is None:
        return RequestState.QUEUED if row.started_at is None else RequestState.RUNNING
    match row.outcome:
        case "completed":
            return RequestState.COMPLETED
        case "cancelled":
            return RequestState.CANCELLED
    return RequestState.FAILED


def status_of(row: StoredRequest) -> RequestStatus:
    """What the row says, as the answer to a question."""
    return RequestStatus(
        request_id=row.id,
        state=state_of(row),
        model=row.model,
        endpoint=row.endpoint,
        created_at=row.created_at,
        grouped_at=row.grouped_at,
        lane=row.lane,
        expected_at=row.expected_at,
        started_at=row.started_at,
        instance_id=None if row.instance_id is None else InstanceId(row.instance_id),
        runs=row.runs,
        ended_at=row.ended_at,
        expires_at=row.expires_at,
        final=UNSET if row.final is None else Raw(row.final),
    )


def final_of(row: StoredRequest) -> Final | None:
    """
    The final of the request; None before its end.

    Raises:
        ContractError: A newer version of Headway wrote a final that this one cannot read.
    """
    return None if row.final is None else _decode(row.final)
