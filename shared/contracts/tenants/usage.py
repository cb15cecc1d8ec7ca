"""Usage of tenants: what is counted of each final, and questions about it."""

from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    TenantId,
    UnixTime,
    Value,
)
from shared.contracts.qos import QosClass

HOUR_S = 3600


class RequestMetered(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.metered.v1"
):
    """
    What one final counts for its tenant. It is published after the final's confirm and before the
    request is acknowledged, so a request that runs twice is metered twice, under the same id.
    """

    request_id: RequestId
    tenant: TenantId
    model: ModelName
    qos_class: QosClass
    outcome: str
    """`completed` or the code of the error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens of all answers; 0 if the request failed, as its prompt tokens."""
    cached_tokens: int = 0
    finished_at: UnixTime
    instance_id: InstanceId


class UsageRow(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Usage of one tenant, model and class in one hour, or a sum of such rows."""

    tenant: TenantId = TenantId("")
    """Empty in a sum over tenants, as the following fields."""
    hour: int = 0
    """Begin of the hour in which requests finished, Unix seconds."""
    model: ModelName = ModelName("")
    qos_class: str = ""
    requests: dict[str, int] = {}
    """Outcome -> number of requests."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class UsageToday(Message, frozen=True, kw_only=True, omit_defaults=True, tag="usage.today.v1"):
    """Tokens of prompts and answers that tenants have used on one day (UTC), for budgets."""

    day: int
    """Number of the day since 1970-01-01."""
    tokens: dict[TenantId, int] = {}


class UsageRequested(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="usage.requested.v1"
):
    """Question about usage; the process that counts it answers with `UsageReported`."""

    reply_to: str
    """Routing key of the answer on `headway.replies`."""
    tenant: TenantId | None = None
    """None: all tenants."""
    since: UnixTime = 0.0
    """Begin of the first hour; rows of earlier hours are left out."""
    until: UnixTime | None = None
    by: tuple[str, ...] = ()
    """Fields that are kept apart: `tenant`, `hour`, `model`, `class`; others are summed."""


class UsageReported(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="usage.reported.v1"
):
    """Answer to `UsageRequested`."""

    rows: tuple[UsageRow, ...] = ()
    counts_since: UnixTime = 0.0
    """Time at which the counting began; 0 if nothing was counted."""
