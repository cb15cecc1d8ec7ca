"""Questions about requests that the store knows, and their answers."""

from enum import Enum

from msgspec import UNSET, Raw, UnsetType

from shared.contracts.base import InstanceId, Message, RequestId, TenantId, UnixTime, Value
from shared.contracts.requests import ErrorInfo


class RequestState(Enum):
    """How far a request has come."""

    QUEUED = "queued"
    """No run of the request was reported yet."""
    RUNNING = "running"
    """A run began, and the request has no final; it may wait again, e.g. after an eviction."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """True if the request has a final."""
        return self not in {RequestState.QUEUED, RequestState.RUNNING}


class StoredStart(Value, frozen=True, kw_only=True):
    """A run of a request whose final the store keeps has begun."""

    tenant: TenantId
    request_id: RequestId
    at: UnixTime


class RunsStarted(Message, frozen=True, kw_only=True, tag="runs.started.v1"):
    """Starts of runs on an instance since its last message; a lost message is not repeated."""

    instance_id: InstanceId
    starts: tuple[StoredStart, ...]


class RequestAsked(Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.asked.v1"):
    """
    Question about a request; a grouper answers with `RequestStatus`.

    The AMQP `user_id` of the question is the tenant, which must be that of the request.
    """

    request_id: RequestId
    reply_to: str
    """Routing key of the answer on `headway.replies`."""
    tenant: TenantId | None = None
    """Tenant of the request, if a trusted user asks."""


class RequestStatus(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.status.v1"
):
    """What the store knows about a request: answer to `RequestAsked`."""

    request_id: RequestId
    state: RequestState | None = None
    """None if the question cannot be answered; then `problem` says why."""
    problem: ErrorInfo | None = None
    model: str | None = None
    endpoint: str | None = None
    """Endpoint of a request that was made in the form of HTTP, as far as the store knows it."""
    created_at: UnixTime | None = None
    """Time at which the store was first asked about the id."""
    grouped_at: UnixTime | None = None
    """Time since which a queue has the request."""
    lane: str | None = None
    expected_at: UnixTime | None = None
    """Time at which service was expected to begin, when the request was grouped."""
    started_at: UnixTime | None = None
    """Begin of the last run that was reported."""
    instance_id: InstanceId | None = None
    """Instance of that run."""
    runs: int = 0
    """Number of runs that were reported."""
    ended_at: UnixTime | None = None
    expires_at: UnixTime | None = None
    """Time after which the store forgets the request."""
    final: Raw | UnsetType = UNSET
    """The final reply, if the request has ended."""
