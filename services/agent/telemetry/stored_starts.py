"""Starts of runs, for the store that keeps the finals of their requests."""

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import InstanceId
from shared.contracts.stored import RunsStarted, StoredStart


class StoredStarts:
    """
    Gathers starts of runs into messages to the store.

    Args:
        instance_id: Id of this instance.
    """

    def __init__(self, broker: Broker, instance_id: InstanceId) -> None:
        self._broker = broker
        self._instance_id = instance_id
        self._starts: list[StoredStart] = []

    def add(self, start: StoredStart) -> None:
        """Add a start to those that `send` sends."""
        self._starts.append(start)

    async def send(self) -> None:
        """Send the starts that were gathered."""
        if not self._starts:
            return
        starts, self._starts = self._starts, []
        started = RunsStarted(instance_id=self._instance_id, starts=tuple(starts))
        message = OutMessage.transient(started)
        await send_best_effort(self._broker, topology.REPLIES, topology.STORED, message)
