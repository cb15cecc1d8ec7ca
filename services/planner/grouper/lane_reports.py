"""What leaders learn from a grouper: the totals of its lanes, and the queues it has released."""

from dataclasses import dataclass

from services.planner.state import GrouperState
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.work_queues import WorkQueues
from shared.contracts.control import QueuesRetired, QueuesRetiring
from shared.contracts.lanes import LaneLayout
from shared.contracts.telemetry import LanesObserved
from shared.runtime.clock import Clock
from shared.tenants.policies import PolicySource


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReports:
    """
    The reports of one grouper.

    Args:
        sender: Name of this process.
        incarnation: Part of the name that is unique to this start of the process.
        state: State of the grouper.
        queues: The work queues of this process.
        layout: Layout of the lanes; the reports have its version.
        policies: Policies of tenants; the reports have their version also.
    """

    broker: Broker
    clock: Clock
    sender: str
    incarnation: str
    state: GrouperState
    queues: WorkQueues
    layout: LaneLayout
    policies: PolicySource

    async def publish(self) -> None:
        """Publish lane totals."""
        state, now, tenants = self.state, self.clock.now(), self.policies.state
        state.seq += 1
        observed = LanesObserved(
            sender=self.sender,
            incarnation=self.incarnation,
            seq=state.seq,
            at=now,
            layout=self.layout.version,
            lanes=tuple(counter.total(lane) for lane, counter in state.lanes.items()),
            admitted=state.admitted,
            refused=state.refused,
            inboxes=state.inboxes_used(now),
            put=dict(self.queues.put),
            released=self.queues.released,
            expired=dict(state.dropped),
            tenants=tenants if tenants.digest else None,
        )
        await self.broker.send(
            topology.TELEMETRY, topology.LANES_KEY, OutMessage.transient(observed)
        )

    async def on_retiring(self, retiring: QueuesRetiring) -> None:
        """Release queues that the leader is about to delete, and report the release."""
        self.queues.release(retiring.queues)
        await self.publish()

    def on_retired(self, retired: QueuesRetired) -> None:
        """Handle the end of a queue retirement."""
        self.queues.forget(retired.deleted + retired.kept)
