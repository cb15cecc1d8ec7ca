"""Times for which instances were idle although work waited that they could serve."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.lanes import model_of
from shared.contracts.telemetry import InstanceStatus
from solver.planning.problem.queue_counts import Passage


@dataclass(slots=True)
class IdleTimes:
    """
    Counters of idle seconds beside waiting work, by instance.

    An instance is idle while it runs nothing, holds nothing and swaps no model. Work waits if some
    request waits from one look to the next; requests that are pulled at once are not waiting work.
    An instance with one model cannot swap, and is not counted.
    """

    idle_s: dict[InstanceId, Seconds] = field(default_factory=dict)
    """Time without a reason that the planner knows."""
    kept_s: dict[InstanceId, Seconds] = field(default_factory=dict)
    """Time in which the instance was kept for express requests of its active model."""
    _seen: dict[InstanceId, UnixTime] = field(default_factory=dict)
    """Instance that was idle at the last look -> time of that look."""
    _queues: Mapping[str, Passage] = field(default_factory=dict)
    """Requests of each queue at the last look."""

    def look(
        self,
        statuses: Iterable[InstanceStatus],
        queues: Mapping[str, Passage],
        kept: Container[InstanceId],
        now: UnixTime,
    ) -> None:
        """
        Count the time since the last look, for instances that were idle at both looks and could
        have served a request that waited at both.

        Args:
            statuses: Instances that take in work.
            queues: Requests of each queue of the mesh.
            kept: Instances that are kept for express requests.
        """
        waiting = self._waiting(queues)
        idle = [each for each in statuses if _is_idle(each)]
        for each in idle:
            name = each.instance_id
            if name in self._seen and any(entry.model in waiting for entry in each.models):
                times = self.kept_s if name in kept else self.idle_s
                times[name] = times.get(name, 0.0) + now - self._seen[name]
        self._seen = {each.instance_id: now for each in idle}
        self._queues = queues

    def _waiting(self, queues: Mapping[str, Passage]) -> frozenset[ModelName]:
        """Models for which a request waits that also waited at the last look."""
        return frozenset(
            model
            for queue, passage in queues.items()
            if (before := self._queues.get(queue)) is not None
            and passage.left < before.last
            and (model := model_of(queue))
        )


def _is_idle(status: InstanceStatus) -> bool:
    has_work = status.running or status.waiting or status.swapped_out or status.activating
    return not has_work and len(status.models) > 1
