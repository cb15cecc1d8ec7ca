"""Policies of tenants, and the messages by which groupers share the limits of tenants."""

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from shared.contracts.base import Message, Seconds, TenantId, UnixTime, Value
from shared.contracts.errors import CapacityError
from shared.contracts.qos import PositiveSeconds, QosClass

Limit = Annotated[int, Meta(ge=1, le=10**15)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]


class LimitKind(Enum):
    """A limit that all groupers share; its value is the name of the policy's field."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "concurrent_requests"
    OUTSTANDING = "outstanding_tokens"

    @property
    def per_minute(self) -> bool:
        """True if a use counts for a minute; False if it counts until the request ends."""
        return self in {LimitKind.REQUESTS, LimitKind.TOKENS}


class TenantPolicy(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a tenant may use. Without any field, everything is allowed and nothing is limited."""

    classes: Annotated[tuple[QosClass, ...], Meta(min_length=1)] | None = None
    """QoS classes that the tenant may use; None: all."""
    min_ttft_s: PositiveSeconds | None = None
    """Tightest target of the time to the first token; None: as tight as the mesh allows."""
    min_tbt_s: PositiveSeconds | None = None
    """Tightest target of the time between tokens."""
    min_ttlt_s: PositiveSeconds | None = None
    """Tightest target of the time to the last token; an absolute deadline is not sooner either."""
    strict: bool = False
    """True: a claim beyond the policy is refused with status 403; False: it is clamped."""
    high_importance: bool = True
    """True if requests may have the importance `high`; otherwise all have the importance `low`."""
    min_priority: Priority = -1000
    max_priority: Priority = 1000
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """
    Weight of the tenant among tenants: with twice the weight, twice the outstanding tokens are the
    same share.
    """
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt and expected answer, counted when a request is admitted."""
    concurrent_requests: Limit | None = None
    """Number of admitted requests that have not ended."""
    outstanding_tokens: Limit | None = None
    """Tokens of prompts and expected answers of admitted requests that have not ended."""
    daily_tokens: Limit | None = None
    """Tokens of prompts and answers of finished requests in one day (UTC)."""

    def limit(self, kind: LimitKind) -> int | None:
        """The value of a limit that all groupers share; None: no limit."""
        value: int | None = getattr(self, kind.value)
        return value

    @property
    def limits(self) -> dict[LimitKind, int]:
        """The limits that are set."""
        return {kind: limit for kind in LimitKind if (limit := self.limit(kind)) is not None}


class TenantsState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Version of the tenants' policies that a process follows."""

    digest: str
    """Digest of the file's content that is in effect; empty without a file."""
    refused: str = ""
    """Error of a newer version of the file, which has no effect."""


class MeterDemand(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What one grouper holds and needs of one limit of one tenant, in requests or tokens."""

    balance: int = 0
    """Granted and not used yet."""
    used: int = 0
    """Used since the process started."""
    in_window: int = 0
    """Used in the last minute; 0 for limits that count until the end of requests."""
    open: int = 0
    """Used by requests that have not ended; 0 for limits per minute."""
    wanted: int = 0
    """Balance that the grouper needs."""
    unit: int = 0
    """What the last request needed; less is of no use."""


class TenantDemand(Message, frozen=True, kw_only=True, omit_defaults=True, tag="tenant.demand.v1"):
    """
    What one grouper holds and needs of the limits of tenants; published while it uses them.

    The grouper that consumes `headway.tenants` answers with `TenantGrants`; all groupers read both.
    """

    source: str
    """Unique name of the grouper process."""
    seq: int
    at: UnixTime
    term: float = 0.0
    """Term of the allocator that the grouper follows; 0 before the first answer."""
    applied: int = 0
    """Number of the last demand whose answer has arrived."""
    meters: dict[TenantId, dict[LimitKind, MeterDemand]] = {}


class MeterGrant(Value, frozen=True, kw_only=True, omit_defaults=True):
    """State of one limit of one tenant at the allocator."""

    limit: int
    granted: int = 0
    """What this answer grants."""
    free: int = 0
    """What no grouper has and no request uses, after this grant."""
    remaining: int = 0
    """What no request uses: `free` and the balances of groupers."""
    next_s: Seconds = 0.0
    """Time until a use of the last minute ends to count; 0 if there is none."""
    reset_s: Seconds = 0.0
    """Time until all present uses of the last minute have ended to count."""


class TenantGrants(Message, frozen=True, kw_only=True, omit_defaults=True, tag="tenant.grants.v1"):
    """Answer to one `TenantDemand`."""

    to: str
    """Source of the demand."""
    term: float
    """Time at which the allocator took over; grants of an earlier term are void."""
    answers: int
    """Number of the demand."""
    answers_at: UnixTime
    """`at` of the demand."""
    is_settled: bool = True
    """False until the allocator has the demands of the other groupers."""
    meters: dict[TenantId, dict[LimitKind, MeterGrant]] = {}


class RateLimit(Value, frozen=True, kw_only=True, omit_defaults=True):
    """State of one limit per minute, for the headers `x-ratelimit-*`."""

    limit: int
    remaining: int = 0
    reset_s: Seconds = 0.0
    """Time until `remaining` is `limit` again if no request comes."""


QUOTA_SPENT = "insufficient_quota"
"""Code and type of errors about the budget of a day."""


class RateLimitedError(CapacityError):
    """
    A limit of the sender's tenant is reached.

    Args:
        message: Tenant, limit and its value, as text for the sender.
        retry_after_s: Time in seconds after which a retry may be admitted.
        code: `rate_limit_exceeded`, or `QUOTA_SPENT` for the budget of a day.
        requests: State of the limit of requests per minute, if there is one.
        tokens: State of the limit of tokens per minute, if there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        code: str,
        requests: RateLimit | None = None,
        tokens: RateLimit | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.code = code
        self.requests = requests
        self.tokens = tokens
