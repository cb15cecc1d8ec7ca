"""Totals of the work that routers have sent to an instance."""

from dataclasses import dataclass

from shared.contracts.base import InstanceId, Seconds
from shared.contracts.routing import SoftState, WorkTotals


@dataclass(slots=True)
class Work:
    """Totals of one router on one instance, or of several routers added up."""

    version: int = 0
    assigned_s: Seconds = 0.0
    dispatched_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    given_up_s: Seconds = 0.0
    num_assigned: int = 0
    num_finished: int = 0

    def add(self, totals: WorkTotals) -> None:
        """Those of one more router."""
        self.assigned_s += totals.assigned_s
        self.dispatched_s += totals.dispatched_s
        self.finished_s += totals.finished_s
        self.given_up_s += totals.given_up_s
        self.num_assigned += totals.num_assigned
        self.num_finished += totals.num_finished

    def told(self) -> WorkTotals:
        """For others."""
        return WorkTotals(
            version=self.version,
            assigned_s=self.assigned_s,
            dispatched_s=self.dispatched_s,
            finished_s=self.finished_s,
            given_up_s=self.given_up_s,
            num_assigned=self.num_assigned,
            num_finished=self.num_finished,
        )


def served_between_s(instance_id: InstanceId, known: SoftState, heard: SoftState) -> Seconds:
    """
    Work that was served there between two states, of routers of which both tell.

    What a router tells of first, or again after it was forgotten, was served at any time before.
    """
    grown_s = 0.0
    for router, work in heard.work.items():
        before, after = known.work.get(router, {}).get(instance_id), work.get(instance_id)
        if before is not None and after is not None:
            grown_s += after.finished_s - after.given_up_s - before.finished_s + before.given_up_s
    return grown_s
