"""Settings of the planner."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.contracts.checks import IngressLimits
from shared.runtime.settings import ServiceSettings


class GrouperSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Taking requests into lanes."""

    interactive_prefetch: Annotated[int, Meta(ge=1, le=1000)] = 128
    rest_prefetch: Annotated[int, Meta(ge=1, le=1000)] = 16
    """At most so many other requests stand before an interactive one inside a grouper."""
    trusted_users: tuple[str, ...] = ("guest", "headway-gateway")
    """Authenticated publishers whose `tenant`, `arrived_at` and `prompt_tokens` are believed."""
    anonymous_tenant: str = "anonymous"
    """Tenant of messages without an authenticated user."""
    max_tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.6
    """Outstanding tokens one tenant may hold beside others before it goes to overflow."""
    free_outstanding_tokens: Annotated[int, Meta(ge=0)] = 20_000
    """Below this a tenant is never above its share."""
    max_outstanding_tokens: Annotated[int, Meta(ge=1)] = 2_000_000_000
    """Tokens admitted by one grouper and unfinished, beyond which requests are refused."""
    duplicate_memory: Annotated[int, Meta(ge=0)] = 20_000
    """Request ids remembered, to drop what a producer published twice."""
    report_period_s: Annotated[float, Meta(gt=0)] = 1.0
    limits: IngressLimits = IngressLimits()


class LeaderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Making plans."""

    policy: str = "edf-batching"
    """Plan generator; `headway-planner check-config` refuses unknown names."""
    plan_period_s: Annotated[float, Meta(gt=0)] = 0.5
    refresh_period_s: Annotated[float, Meta(gt=0)] = 2.0
    """An unchanged plan is sent again so often, for agents that have just come."""
    scan_period_s: Annotated[float, Meta(gt=0)] = 120.0
    """Every possible lane is counted so often, should a notice of it have been lost."""
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """An instance that has been silent so long gets no work."""
    settle_s: Annotated[float, Meta(ge=0)] = 1.5
    """A new leader listens so long before its first plan; agents keep the old one meanwhile."""
    min_residency_s: Annotated[float, Meta(ge=0)] = 3.0
    """A model stays active so long before it may be swapped for another."""
    express_deadline_s: Annotated[float, Meta(gt=0)] = 5.0
    """Requests with a deadline this near make their model express."""
    express_lease_s: Annotated[float, Meta(ge=0)] = 10.0
    """An express model keeps an instance so long after such a request, best effort or not."""


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the planner can be told."""

    roles: tuple[Literal["grouper", "leader"], ...] = ("grouper", "leader")
    """Any number of groupers compete; of all leaders one is active."""
    grouper: GrouperSettings = GrouperSettings()
    leader: LeaderSettings = LeaderSettings()
