"""Handlers of the planner's messages. Messages of unknown kinds are ignored."""

import structlog

from services.planner.grouper.grouper import Grouper
from services.planner.leader.leader import Leader
from shared.broker import topology
from shared.broker.consumer import Dispatcher, Handler
from shared.broker.protocol import Delivery, DeliveryHandler, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import Message
from shared.contracts.control import LaneNonempty, QueuesRetired, QueuesRetiring
from shared.contracts.estimates import AlarmRaised, Profile
from shared.contracts.plans import LanesForecast, PlanRequested
from shared.contracts.routing import PrefillsObserved, PrefillTrees, RouterState
from shared.contracts.telemetry import (
    InstanceStatus,
    LanesObserved,
    LanesPulled,
    LeaderTick,
    RequestObserved,
    RequestsExpired,
)
from shared.contracts.tenants.policies import TenantDemand, TenantGrants
from shared.contracts.tenants.usage import UsageToday

log = structlog.get_logger()


async def on_request_observed(
    message: RequestObserved, grouper: Grouper, _delivery: Delivery
) -> None:
    """Handle the end of a request."""
    grouper.on_ended(message)


async def on_lanes_forecast(message: LanesForecast, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle the leader's forecasts of lanes."""
    grouper.on_forecast(message)


async def on_routed_status(message: InstanceStatus, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle the status of an instance, to which requests may be routed."""
    if grouper.routing is not None:
        grouper.routing.on_status(message)


async def on_prefills(message: PrefillsObserved, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle an instance's report of first tokens."""
    for prefill in message.prefills:
        grouper.expiry.on_begun(prefill.request_id, prefill.tenant)
    if grouper.routing is not None:
        grouper.routing.on_prefills(message)


async def on_requests_expired(
    message: RequestsExpired, grouper: Grouper, _delivery: Delivery
) -> None:
    """Handle the requests that another grouper has ended."""
    grouper.expiry.on_expired(message)


async def on_router_state(message: RouterState, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle the shared state of another grouper's router."""
    if grouper.routing is not None:
        grouper.routing.on_state(message)


async def on_learnt(message: Profile, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle a profile of the estimator."""
    grouper.on_profile(message)


async def on_prefill_trees(message: PrefillTrees, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle new quantile trees of prefill times from the estimator."""
    if grouper.routing is not None:
        grouper.routing.on_trees(message)


async def on_queues_retiring(
    message: QueuesRetiring, grouper: Grouper, _delivery: Delivery
) -> None:
    """Handle the notice that the leader is about to delete queues."""
    await grouper.reports.on_retiring(message)


async def on_queues_retired(message: QueuesRetired, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle the end of a queue retirement."""
    grouper.reports.on_retired(message)


async def on_tenant_demand(message: TenantDemand, grouper: Grouper, _delivery: Delivery) -> None:
    """Record what a grouper holds and needs of the limits of tenants."""
    grouper.tenants.on_demand(message)


async def on_tenant_grants(message: TenantGrants, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle an answer to a demand."""
    grouper.tenants.on_grants(message)


async def on_usage_today(message: UsageToday, grouper: Grouper, _delivery: Delivery) -> None:
    """Handle the tokens that tenants have used today."""
    grouper.tenants.on_usage(message)


async def on_instance_status(message: InstanceStatus, leader: Leader, _delivery: Delivery) -> None:
    leader.on_status(message)


async def on_lanes_observed(message: LanesObserved, leader: Leader, _delivery: Delivery) -> None:
    leader.on_lanes(message)


async def on_lanes_pulled(message: LanesPulled, leader: Leader, _delivery: Delivery) -> None:
    leader.on_pulled(message)


async def on_leader_tick(_message: LeaderTick, _leader: Leader, _delivery: Delivery) -> None:
    """No-op: a tick only causes a delivery, which shows that this process leads."""


async def on_alarm_raised(message: AlarmRaised, leader: Leader, _delivery: Delivery) -> None:
    """Handle an alarm: an instance is slower than predicted, so the next round replans."""
    leader.state.alarms_heard += 1
    log.info("alarm.heard", alarm=message.alarm.value, instance_id=message.instance_id)


async def on_lane_nonempty(message: LaneNonempty, leader: Leader, _delivery: Delivery) -> None:
    leader.noticed(message)


async def on_profile(message: Profile, leader: Leader, _delivery: Delivery) -> None:
    leader.state.on_profile(message)


GROUPER_HANDLERS: dict[type[Message], Handler[Grouper]] = {
    RequestObserved: on_request_observed,
    LanesForecast: on_lanes_forecast,
    InstanceStatus: on_routed_status,
    PrefillsObserved: on_prefills,
    RequestsExpired: on_requests_expired,
    RouterState: on_router_state,
    Profile: on_learnt,
    PrefillTrees: on_prefill_trees,
    QueuesRetiring: on_queues_retiring,
    QueuesRetired: on_queues_retired,
    TenantDemand: on_tenant_demand,
    TenantGrants: on_tenant_grants,
    UsageToday: on_usage_today,
}
STATE_HANDLERS: dict[type[Message], Handler[Leader]] = {
    InstanceStatus: on_instance_status,
    LanesObserved: on_lanes_observed,
    LanesPulled: on_lanes_pulled,
    LeaderTick: on_leader_tick,
    AlarmRaised: on_alarm_raised,
}


async def on_plan_asked(message: PlanRequested, leader: Leader, _delivery: Delivery) -> None:
    await leader.explain(message)


NOTICE_HANDLERS: dict[type[Message], Handler[Leader]] = {
    PlanRequested: on_plan_asked,
    LaneNonempty: on_lane_nonempty,
    Profile: on_profile,
}


def leader_state_handler(leader: Leader) -> DeliveryHandler:
    """
    Handler for the leader queue: the process that receives messages of this queue is the leader.
    """
    dispatcher = Dispatcher(STATE_HANDLERS, leader)

    async def handle(delivery: Delivery) -> None:
        # After the loss of its connection, a delivery goes to the next leader.
        if not delivery.has_returned():
            leader.activated()
        await dispatcher.handle(delivery)

    return handle


async def tick(leader: Leader) -> None:
    """Publish a tick to the leader queue, which needs messages even without agents and groupers."""
    message = OutMessage.transient(LeaderTick(sender=leader.leader_id, at=leader.clock.now()))
    await send_best_effort(leader.broker, topology.TELEMETRY, topology.TICK_KEY, message)
