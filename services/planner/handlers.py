"""What the planner does with each soft-state message. Unknown kinds are ignored."""

from services.planner.grouper import Grouper
from services.planner.leader import Leader
from shared.broker import topology
from shared.broker.consumer import Dispatcher, Handler
from shared.broker.protocol import Delivery, DeliveryHandler, OutMessage
from shared.broker.retry import send_softly
from shared.contracts.base import Message, encode
from shared.contracts.control import LaneNonempty
from shared.contracts.estimates import AlarmRaised, Profile
from shared.contracts.telemetry import InstanceStatus, LanesObserved, LeaderTick, RequestObserved


async def on_request_observed(
    message: RequestObserved, grouper: Grouper, _delivery: Delivery
) -> None:
    """A request ended somewhere: its tenant holds less."""
    grouper.state.finish(message.request_id, message.tenant)


async def on_instance_status(message: InstanceStatus, leader: Leader, _delivery: Delivery) -> None:
    leader.state.on_status(message, leader.clock.now())


async def on_lanes_observed(message: LanesObserved, leader: Leader, _delivery: Delivery) -> None:
    leader.state.on_lanes(message)
    for total in message.lanes:
        leader.noticed(total.lane)


async def on_nothing(_message: Message, _leader: Leader, _delivery: Delivery) -> None:
    """Ticks only keep the queue moving; alarms will trigger replanning."""


async def on_lane_nonempty(message: LaneNonempty, leader: Leader, _delivery: Delivery) -> None:
    leader.noticed(message.queue)


async def on_profile(message: Profile, leader: Leader, _delivery: Delivery) -> None:
    leader.state.on_profile(message)


GROUPER_HANDLERS: dict[type[Message], Handler[Grouper]] = {RequestObserved: on_request_observed}
STATE_HANDLERS: dict[type[Message], Handler[Leader]] = {
    InstanceStatus: on_instance_status,
    LanesObserved: on_lanes_observed,
    LeaderTick: on_nothing,
    AlarmRaised: on_nothing,
}
NOTICE_HANDLERS: dict[type[Message], Handler[Leader]] = {
    LaneNonempty: on_lane_nonempty,
    Profile: on_profile,
}


def leader_state_handler(leader: Leader) -> DeliveryHandler:
    """For the leader queue: receiving anything on it is what makes the leader."""
    dispatcher = Dispatcher(STATE_HANDLERS, leader)

    async def handle(delivery: Delivery) -> None:
        leader.activated()
        await dispatcher.handle(delivery)

    return handle


async def tick(leader: Leader) -> None:
    """Keep the leader queue moving while agents and groupers are silent."""
    await send_softly(
        leader.broker,
        topology.TELEMETRY,
        topology.TICK_KEY,
        OutMessage(
            body=encode(LeaderTick(sender=leader.leader_id, at=leader.clock.now())),
            kind="leader.tick.v1",
            persistent=False,
        ),
    )
