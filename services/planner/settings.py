"""Settings of the planner."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.contracts.checks import IngressLimits
from shared.contracts.qos import Importance
from shared.runtime.settings import ServiceSettings
from solver.planning.capacity.advice import AdviceOptions
from solver.planning.reserved_capacity import ReservedCapacityOptions


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routing of requests to instances, instead of lanes from which instances pull."""

    policy: str = "pull"
    """`pull`, or a routing policy; `headway-planner check-config` refuses unknown names."""
    scope: Literal["interactive", "all"] = "interactive"
    """Requests that are routed; others are pulled."""
    max_waiting: Annotated[int, Meta(ge=1, le=1000)] = 64
    """
    Maximum number of interactive requests waiting in this grouper for their turn; others go to
    lanes. Must be below `interactive_prefetch`, or requests of models without an instance would
    wait behind them.
    """
    max_waiting_rest: Annotated[int, Meta(ge=1, le=1000)] = 8
    """
    Maximum number of other requests waiting in this grouper for their turn; must be below
    `rest_prefetch`.
    """
    max_wait_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    """
    Waiting time after which requests go to lanes, whatever delays their instance. Far below the
    half hour after which RabbitMQ requeues deliveries.
    """
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 3.0
    """Silence of an instance after which it gets no more requests."""
    work_period_s: Annotated[float, Meta(gt=0)] = 0.02
    """Period of publishing sent work to other groupers, while it changes."""
    share_period_s: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """Period of publishing learnt state to other groupers and the estimator."""


class GrouperSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Intake of requests into lanes."""

    interactive_prefetch: Annotated[int, Meta(ge=1, le=1000)] = 128
    rest_prefetch: Annotated[int, Meta(ge=1, le=1000)] = 16
    """
    Prefetch of the queue of requests that are not interactive: the maximum number of them inside a
    grouper ahead of an interactive request.
    """
    trusted_users: tuple[str, ...] = ("guest", "headway-gateway")
    """Authenticated publishers whose `tenant`, `arrived_at` and `prompt_tokens` are trusted."""
    anonymous_tenant: str = "anonymous"
    """Tenant of messages without an authenticated user."""
    max_tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.6
    """
    Share of outstanding tokens above which a tenant's requests go to overflow, if others have any.
    """
    free_outstanding_tokens: Annotated[int, Meta(ge=0)] = 20_000
    """Outstanding tokens below which a tenant is never above its share."""
    max_outstanding_tokens: Annotated[int, Meta(ge=1)] = 2_000_000_000
    """Outstanding tokens admitted by one grouper above which requests are refused."""
    max_tenant_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Outstanding tokens of one tenant above which its requests are refused; None: unlimited."""
    tenant_tokens: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """Tenant -> limit that replaces `max_tenant_tokens` for this tenant."""
    refuse_late_from: Annotated[float, Meta(gt=0, le=1)] | None = None
    """
    Probability of being late from which a request is refused; None admits it and serves it late.
    """
    routing: RoutingSettings = RoutingSettings()
    duplicate_memory: Annotated[int, Meta(ge=0)] = 20_000
    """Number of remembered request ids, to drop duplicates of producers."""
    report_period_s: Annotated[float, Meta(gt=0)] = 1.0
    limits: IngressLimits = IngressLimits()


class LeaderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the leader."""

    policy: str = "qlm"
    """Plan generator; `headway-planner check-config` refuses unknown names."""
    plan_period_s: Annotated[float, Meta(gt=0)] = 0.5
    refresh_period_s: Annotated[float, Meta(gt=0)] = 2.0
    """Period of publishing an unchanged plan again, for new agents."""
    audit_period_s: Annotated[float, Meta(gt=0)] = 60.0
    """Period of counting the queues that exist, to correct the numbers known from reports."""
    scan_period_s: Annotated[float, Meta(gt=0)] = 3600.0
    """
    Period of looking for every possible lane and companion, as a new leader does; only a process
    that died before its first report can leave an unknown one. RabbitMQ logs an error for each
    queue that does not exist.
    """
    retire_idle_s: Annotated[float, Meta(gt=0)] = 600.0
    """
    Time that a lane or companion queue is empty and unused before it is deleted. A process that
    has been silent for this time counts as gone: no stall may be longer.
    """
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Silence of an instance after which it gets no work."""
    group_batch_multiple: Annotated[float, Meta(gt=0, le=64)] = 4.0
    """Maximum size of a request group, as a multiple of an instance's batch (QLM's delta)."""
    high_weight: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    """
    Number of late requests of low importance that cost as much as one late request of high
    importance; 100 is nearly a strict order.
    """
    solve_budget_s: Annotated[float, Meta(gt=0, le=60)] = 0.3
    """CPU time limit of the plan generator for a new plan."""
    advise_target: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Expected weighted share of requests in time below which advice on scale is computed."""
    advise_period_s: Annotated[float, Meta(gt=0)] = 30.0
    """
    Minimum time between two computations of advice, each of which delays planning by a second or
    two.
    """
    advise_most: Annotated[int, Meta(ge=1, le=64)] = 8
    """Maximum number of additional instances that advice considers."""
    advise_start_s: Annotated[float, Meta(ge=0)] = 60.0
    """Start-up time of an additional instance, without a model."""
    settle_s: Annotated[float, Meta(ge=0)] = 1.5
    """
    Time that a new leader collects statuses before its first plan; agents keep the old plan
    meanwhile.
    """
    min_residency_s: Annotated[float, Meta(ge=0)] = 3.0
    """Minimum time that a model stays active before it may be swapped."""
    reserved_deadline_s: Annotated[float, Meta(gt=0)] = 5.0
    """Deadline up to which requests make their model express, i.e. reserve capacity for it."""
    reserved_lease_s: Annotated[float, Meta(ge=0)] = 10.0
    """
    Time that an express model keeps an instance after its last request with such a deadline.
    Meanwhile another model may take the instance only for requests with deadlines that no instance
    without such a lease can serve.
    """

    @property
    def advice(self) -> AdviceOptions:
        """Options of advice on scale."""
        return AdviceOptions(
            target=self.advise_target, most=self.advise_most, start_s=self.advise_start_s
        )

    @property
    def express(self) -> ReservedCapacityOptions:
        """Options of reserved capacity for short deadlines."""
        return ReservedCapacityOptions(
            deadline_s=self.reserved_deadline_s, lease_s=self.reserved_lease_s
        )

    @property
    def importance_weight(self) -> dict[str, float]:
        """Cost of one late request, by importance."""
        return {Importance.HIGH.value: self.high_weight, Importance.LOW.value: 1.0}


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the planner."""

    roles: tuple[Literal["grouper", "leader"], ...] = ("grouper", "leader")
    """Any number of groupers compete; exactly one leader is active."""
    grouper: GrouperSettings = GrouperSettings()
    leader: LeaderSettings = LeaderSettings()
