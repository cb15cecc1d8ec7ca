"""Settings of the planner."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.contracts.checks import IngressLimits
from shared.contracts.qos import Importance, OnLate, QosClass
from shared.runtime.settings import ServiceSettings
from shared.store.settings import StoreSettings
from solver.planning.capacity.advice import AdviceOptions
from solver.planning.reserved_capacity import ReservedCapacityOptions
from solver.planning.residency import RESIDENCY_SWAPS


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of routing requests to instances, instead of pulling them from lanes."""

    policy: str = "pull"
    """
    Routing policy: `pull` (no routing) or the name of a policy; `headway-planner check-config`
    refuses unknown names.
    """
    scope: Literal["interactive", "all"] = "interactive"
    """Requests that are routed to instances; instances pull the other requests."""
    max_waiting: Annotated[int, Meta(ge=1, le=1000)] = 64
    """
    Maximum number of interactive requests that wait in this grouper to be sent; further requests go
    to their lanes. Must be below `interactive_prefetch`; otherwise requests of models without an
    instance would wait behind the waiting requests.
    """
    max_waiting_rest: Annotated[int, Meta(ge=1, le=1000)] = 8
    """
    Maximum number of other requests that wait in this grouper to be sent. Must be below
    `rest_prefetch`.
    """
    max_wait_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    """
    Waiting time after which requests go to their lanes. The time must be far below 30 minutes, the
    time after which RabbitMQ requeues unacknowledged deliveries.
    """
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 3.0
    """Time without a status after which an instance gets no more routed requests."""
    work_period_s: Annotated[float, Meta(gt=0)] = 0.02
    """Period of publishing changes of sent work to other groupers."""
    share_period_s: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """Period of publishing learnt state to other groupers and to the estimator."""


class GrouperSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the intake of requests into lanes."""

    interactive_prefetch: Annotated[int, Meta(ge=1, le=1000)] = 128
    rest_prefetch: Annotated[int, Meta(ge=1, le=1000)] = 256
    """
    Prefetch of the queue of non-interactive requests. Requests under ids count until the store has
    a note that they are queued. They begin one per turn of the event loop, so that interactive
    requests wait for few of them.
    """
    trusted_users: tuple[str, ...] = ("guest", "headway-gateway")
    """Authenticated publishers whose `tenant`, `arrived_at` and `prompt_tokens` are trusted."""
    unknown_model_wait_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    """
    Time for which a request whose model is not in the registry waits for it, before it is refused:
    its gateway or producer may have read a newer registry file.
    """
    max_unknown_model_waiting: Annotated[int, Meta(ge=0, le=1000)] = 8
    """
    Maximum number of requests that wait for their model; others are refused at once. Must be below
    `rest_prefetch`, so that requests for known models do not wait behind them.
    """
    calls_of_items: bool = False
    """
    True if all engines are vLLM: a message of llm-d-async with the endpoint of a call is a call.
    False: its payload is read as text or tokens, whatever its endpoint is.
    """
    anonymous_tenant: str = "anonymous"
    """Tenant of messages without an authenticated user."""
    max_tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.6
    """
    Share of outstanding tokens above which a tenant's requests go to overflow queues, unless no
    other tenant has outstanding tokens.
    """
    free_outstanding_tokens: Annotated[int, Meta(ge=0)] = 20_000
    """Number of outstanding tokens below which a tenant is never above its share."""
    max_outstanding_tokens: Annotated[int, Meta(ge=1)] = 2_000_000_000
    """Number of outstanding tokens in one grouper above which the grouper refuses requests."""
    max_tenant_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Outstanding tokens of one tenant above which its requests are refused; None: no limit."""
    tenant_tokens: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """Tenant -> limit that replaces `max_tenant_tokens` for this tenant."""
    refuse_late_from: Annotated[float, Meta(gt=0, le=1)] | None = None
    """
    Probability of being late from which a request is refused; None: the request is served late.
    """
    on_late: dict[QosClass, OnLate] = {}
    """
    QoS class -> what happens at their deadlines to requests that do not say it themselves: `serve`
    (the default) or `drop`.
    """
    max_watched_ends: Annotated[int, Meta(ge=0)] = 200_000
    """
    Maximum number of waiting requests whose ends this grouper watches. Other requests end when an
    instance pulls them, or when they are the first of their queue.
    """
    expired_memory: Annotated[int, Meta(ge=1)] = 200_000
    """
    Number of ended requests that are remembered, so that the dead letter of a request that has
    ended already causes no second reply.
    """
    routing: RoutingSettings = RoutingSettings()
    duplicate_memory: Annotated[int, Meta(ge=1)] = 20_000
    """Number of request ids that are remembered to drop duplicates."""
    report_period_s: Annotated[float, Meta(gt=0)] = 1.0
    limits: IngressLimits = IngressLimits()


class LeaderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the leader."""

    policy: str = "qlm"
    """Policy that makes plans; `headway-planner check-config` refuses unknown names."""
    plan_period_s: Annotated[float, Meta(gt=0)] = 0.5
    refresh_period_s: Annotated[float, Meta(gt=0)] = 2.0
    """Period of publishing an unchanged plan again, for new agents."""
    audit_period_s: Annotated[float, Meta(gt=0)] = 60.0
    """Period of counting the queues that exist, to correct the numbers known from reports."""
    retire_idle_s: Annotated[float, Meta(gt=0)] = 600.0
    """
    Time that a lane or companion queue is empty and unused before it is deleted. A process that has
    been silent for this time counts as gone: no stall of a process may be longer.
    """
    instance_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Time without a status after which an instance gets no work."""
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
    Minimum time between two computations of advice on scale; each computation delays planning by 1
    to 2 s.
    """
    advise_most: Annotated[int, Meta(ge=1, le=64)] = 8
    """Maximum number of additional instances that advice on scale considers."""
    advise_start_s: Annotated[float, Meta(ge=0)] = 60.0
    """Start-up time of an additional instance without loading a model."""
    advise_busy_share: Annotated[float, Meta(gt=0, le=1)] = 0.7
    """Share of their throughput up to which fewer instances are enough for the arriving work."""
    advise_down_after_s: Annotated[float, Meta(ge=0)] = 600.0
    """Time for which fewer instances must have been enough before fewer are advised."""
    settle_s: Annotated[float, Meta(ge=0)] = 1.5
    """
    Time for which a new leader collects statuses before its first plan. Until the new plan, agents
    follow the old plan.
    """
    min_residency_swaps: Annotated[float, Meta(ge=0)] = RESIDENCY_SWAPS
    """
    Minimum time that a model stays active while work for it waits, as a multiple of the time of a
    swap. Work with deadlines does not wait for work without.
    """
    reserved_deadline_s: Annotated[float, Meta(gt=0)] = 5.0
    """
    Upper limit of deadlines, in time from arrival, that make a lane express. The plan reserves
    capacity for the models of express lanes.
    """
    reserved_lease_s: Annotated[float, Meta(ge=0)] = 10.0
    """
    Time after an express request for which its model is expected to get more of them. In this time,
    a swap of its instance costs the express requests that would arrive until the model is back.
    """
    reserved_longest_wait_s: Annotated[float, Meta(ge=0)] = 600.0
    """
    Longest time for which work without a deadline waits for an instance with an express model. It
    waits for a share of this time: the probability of an express arrival during a swap there and
    back.
    """

    @property
    def advice(self) -> AdviceOptions:
        """Convert these settings to the options of advice on scale."""
        return AdviceOptions(
            target=self.advise_target,
            most=self.advise_most,
            start_s=self.advise_start_s,
            busy_share=self.advise_busy_share,
            period_s=self.advise_period_s,
            down_after_s=self.advise_down_after_s,
        )

    @property
    def express(self) -> ReservedCapacityOptions:
        """
        Convert these settings to the options of capacity that is reserved for short deadlines.
        """
        return ReservedCapacityOptions(
            deadline_s=self.reserved_deadline_s,
            lease_s=self.reserved_lease_s,
            longest_wait_s=self.reserved_longest_wait_s,
        )

    @property
    def importance_weight(self) -> dict[str, float]:
        """Cost of one late request, by the request's importance."""
        return {Importance.HIGH.value: self.high_weight, Importance.LOW.value: 1.0}


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the planner."""

    roles: tuple[Literal["grouper", "leader"], ...] = ("grouper", "leader")
    """
    Roles of this process: grouper, leader or both. Several groupers can run, and one leader is
    active.
    """
    grouper: GrouperSettings = GrouperSettings()
    leader: LeaderSettings = LeaderSettings()
    store: StoreSettings = StoreSettings()
    """
    Store of groupers, the same as the gateways': they claim in it the ids of requests with an
    `Idempotency-Key` or the header `x-headway-idempotent`. Without `store.data_dir` and `store.url`
    there is none, and such requests are refused.
    """
