"""Settings of the planner."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.contracts.checks import IngressLimits
from shared.contracts.qos import Importance
from shared.runtime.settings import ServiceSettings
from solver.planning.advice import AdviceOptions
from solver.planning.express import ExpressOptions


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether requests are routed to instances, instead of waiting in lanes to be pulled."""

    policy: str = "pull"
    """`pull`, or a routing policy; `headway-planner check-config` refuses unknown names."""
    scope: Literal["interactive", "all"] = "interactive"
    """Which requests are routed; others are pulled."""
    max_waiting: Annotated[int, Meta(ge=1, le=1000)] = 64
    """Interactive requests that wait in this grouper for their turn; more go to lanes. Below
    `interactive_prefetch`, or those of models without an instance would wait behind them."""
    max_waiting_rest: Annotated[int, Meta(ge=1, le=1000)] = 8
    """The same of all others, below `rest_prefetch`."""
    max_wait_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    """Requests that have waited here for so long go to lanes, whatever keeps their instance. Far
    below the half hour after which RabbitMQ takes deliveries back."""
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 3.0
    """An instance that has been silent so long gets no more requests."""
    work_period_s: Annotated[float, Meta(gt=0)] = 0.02
    """Groupers tell each other so often what they have sent, while that changes."""
    share_period_s: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """And so often what they have learnt; the estimator hears it, too."""


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
    max_tenant_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Likewise of one tenant; no limit of its own by default."""
    tenant_tokens: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """Limits of single tenants, instead of `max_tenant_tokens`."""
    refuse_late_from: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Refuse what would be late with this probability; none takes it and serves it late."""
    routing: RoutingSettings = RoutingSettings()
    duplicate_memory: Annotated[int, Meta(ge=0)] = 20_000
    """Request ids remembered, to drop what a producer published twice."""
    report_period_s: Annotated[float, Meta(gt=0)] = 1.0
    limits: IngressLimits = IngressLimits()


class LeaderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Making plans."""

    policy: str = "qlm"
    """Plan generator; `headway-planner check-config` refuses unknown names."""
    plan_period_s: Annotated[float, Meta(gt=0)] = 0.5
    refresh_period_s: Annotated[float, Meta(gt=0)] = 2.0
    """An unchanged plan is sent again so often, for agents that have just come."""
    scan_period_s: Annotated[float, Meta(gt=0)] = 120.0
    """Every possible lane is counted so often, should a notice of it have been lost."""
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """An instance that has been silent so long gets no work."""
    group_batch_multiple: Annotated[float, Meta(gt=0, le=64)] = 4.0
    """Requests that a group holds at most, in batches of an instance (QLM's delta)."""
    high_weight: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    """Late requests of low importance that one of high costs; 100 is as good as a strict order."""
    solve_budget_s: Annotated[float, Meta(gt=0, le=60)] = 0.3
    """CPU time that the plan generator may take for a new plan."""
    classes_period_s: Annotated[float, Meta(gt=0)] = 600.0
    """Edges between work classes are refitted at most so often, to what came meanwhile."""
    classes_gain: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Share of the variance inside classes by which other edges must beat those in force."""
    classes_least_requests: Annotated[int, Meta(ge=2)] = 500
    """Of a model, before anything is concluded from their work."""
    lane_retire_s: Annotated[float, Meta(ge=0)] = 60.0
    """Lanes of older edges are deleted when nothing has waited in them for so long."""
    advise_target: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Weighted share of requests in time below whose expectation advice on scale is made."""
    advise_period_s: Annotated[float, Meta(gt=0)] = 30.0
    """Such advice is made at most so often; planning waits for it for a second or two."""
    advise_most: Annotated[int, Meta(ge=1, le=64)] = 8
    """Further instances that it goes up to at once."""
    advise_start_s: Annotated[float, Meta(ge=0)] = 60.0
    """What it takes for a further instance to be up, without a model."""
    settle_s: Annotated[float, Meta(ge=0)] = 1.5
    """A new leader listens so long before its first plan; agents keep the old one meanwhile."""
    min_residency_s: Annotated[float, Meta(ge=0)] = 3.0
    """A model stays active so long before it may be swapped for another."""
    express_deadline_s: Annotated[float, Meta(gt=0)] = 5.0
    """Requests with a deadline this near make their model express."""
    express_lease_s: Annotated[float, Meta(ge=0)] = 10.0
    """An express model keeps an instance so long after such a request, best effort or not."""

    @property
    def advice(self) -> AdviceOptions:
        """What advice on scale is to go by."""
        return AdviceOptions(
            target=self.advise_target, most=self.advise_most, start_s=self.advise_start_s
        )

    @property
    def express(self) -> ExpressOptions:
        """What counts as express."""
        return ExpressOptions(deadline_s=self.express_deadline_s, lease_s=self.express_lease_s)

    @property
    def tier_weight(self) -> dict[str, float]:
        """What one late request costs, by importance."""
        return {Importance.HIGH.value: self.high_weight, Importance.LOW.value: 1.0}


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the planner can be told."""

    roles: tuple[Literal["grouper", "leader"], ...] = ("grouper", "leader")
    """Any number of groupers compete; of all leaders one is active."""
    grouper: GrouperSettings = GrouperSettings()
    leader: LeaderSettings = LeaderSettings()
