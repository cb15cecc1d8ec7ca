"""Word to agents that there is something to pull."""

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_softly
from shared.contracts.base import encode
from shared.contracts.control import LaneNonempty


async def tell_nonempty(broker: Broker, queue: str) -> None:
    """Something was put into *queue*; may get lost, then agents find it a little later."""
    notice = OutMessage(
        body=encode(LaneNonempty(queue=queue)), kind="lane.nonempty.v1", persistent=False
    )
    await send_softly(broker, topology.CONTROL, topology.CONTROL_LANE, notice)
