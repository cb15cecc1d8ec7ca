"""What is asked under the ids of requests, and what comes back, as the store keeps it."""

from enum import Enum

import msgspec

from shared.contracts.base import InstanceId, RequestId, Seconds, TenantId, UnixTime

Key = tuple[TenantId, RequestId]


class ClaimOutcome(Enum):
    """What happens to a message under an id."""

    CLAIMED = "claimed"
    """It is the first one: its request goes into a queue."""
    JOINED = "joined"
    """The request is in a queue already; the message's reply queue waits for the final."""
    ENDED = "ended"
    """The request has ended; the answer is its final."""
    CONFLICT = "conflict"
    """Something else was asked under this id."""
    BUSY = "busy"
    """Another grouper puts the request into its queue now, or has failed to: ask again."""


class ClaimAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A message that asks for a request under an id."""

    tenant: TenantId
    request_id: RequestId
    digest: str
    reply_to: str | None
    kept_s: Seconds
    model: str
    endpoint: str | None = None
    """Path of the API call; None for a request that is not a call."""

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `ClaimAsked`."""

    outcome: ClaimOutcome
    final: bytes | None = None
    """The encoded final reply, if the request has ended."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is going to be published; its row is made before."""

    tenant: TenantId
    request_id: RequestId
    digest: str
    endpoint: str
    model: str
    kept_s: Seconds

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id


class Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed request that a queue has; `expected_at` is None without a forecast."""

    tenant: TenantId
    request_id: RequestId
    at: UnixTime
    """Time since which the queue has it, by the grouper's clock."""
    lane: str
    expected_at: UnixTime | None

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a request began."""

    tenant: TenantId
    request_id: RequestId
    instance_id: InstanceId
    at: UnixTime

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A final reply of a request."""

    tenant: TenantId
    request_id: RequestId
    outcome: str
    """`completed`, or the code of the error."""
    final: bytes
    at: UnixTime
    answered_by: Started | None = None
    """The run that answered: notes of starts may come later than the answer, or never."""
    is_refusal: bool = False
    """True if the request was refused before it was grouped."""

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A reply queue that gets the final of a request."""

    id: str
    reply_to: str


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The final of a request as the store keeps it, and the reply queues that wait for it."""

    final: bytes | None
    """The first final; None if the request has no row."""
    waiters: tuple[Waiter, ...] = ()


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request is."""

    has_started: bool
    outcome: str | None
    """`completed`, or the code of the error; None until the end."""


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table `requests`; its columns have comments in `shared.store.schema`."""

    tenant: TenantId
    id: RequestId
    digest: str
    is_asked: bool
    endpoint: str | None
    model: str | None
    created_at: UnixTime
    claimed_by: str | None
    claimed_until: UnixTime | None
    grouped_at: UnixTime | None
    lane: str | None
    expected_at: UnixTime | None
    instance_id: str | None
    started_at: UnixTime | None
    runs: int
    ended_at: UnixTime | None
    outcome: str | None
    final: bytes | None
    kept_s: Seconds
    expires_at: UnixTime
    memory_mesh: str | None = None
