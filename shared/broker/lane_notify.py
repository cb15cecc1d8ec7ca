"""Notices to agents that a queue contains messages."""

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import encode
from shared.contracts.control import LaneNonempty


async def notify_nonempty(broker: Broker, queue: str, *, source: str = "", put: int = 0) -> None:
    """
    Notify agents and the leader that *queue* is not empty. If the notice is lost, they find out a
    little later.

    Args:
        broker: Broker that carries the notice.
        queue: Queue that got requests.
        source: Publisher of the requests, as in its reports; empty if it sends none.
        put: Number of requests that *source* has published to *queue* since its start.
    """
    notice = OutMessage(
        body=encode(LaneNonempty(queue=queue, source=source, put=put)),
        kind="lane.nonempty.v1",
        persistent=False,
    )
    await send_best_effort(broker, topology.CONTROL, topology.CONTROL_LANE, notice)
