"""Notices to agents that a queue contains messages."""

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import encode
from shared.contracts.control import LaneNonempty


async def notify_nonempty(broker: Broker, queue: str) -> None:
    """
    Notify agents that *queue* contains messages.

    If the notice is lost, agents find the messages a little later by polling.
    """
    notice = OutMessage(
        body=encode(LaneNonempty(queue=queue)), kind="lane.nonempty.v1", persistent=False
    )
    await send_best_effort(broker, topology.CONTROL, topology.CONTROL_LANE, notice)
