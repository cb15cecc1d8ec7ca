"""Times for which instances were idle although work waited that they could serve."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.lanes import model_of
from shared.contracts.telemetry import InstanceStatus


@dataclass(slots=True)
class IdleTimes:
    """
    Counters of idle seconds beside waiting work, by instance.

    An instance is idle while it runs nothing, holds nothing and swaps no model. An instance with
    one model cannot swap, and is not counted.
    """

    idle_s: dict[InstanceId, Seconds] = field(default_factory=dict)
    """Time without a reason that the planner knows."""
    kept_s: dict[InstanceId, Seconds] = field(default_factory=dict)
    """Time in which the instance was kept for express requests of its active model."""
    _seen: dict[InstanceId, UnixTime] = field(default_factory=dict)
    """Instance -> time of the last look, if it was idle beside work then."""

    def look(
        self,
        statuses: Iterable[InstanceStatus],
        waiting: Container[ModelName],
        kept: Container[InstanceId],
        now: UnixTime,
    ) -> None:
        """
        Count the time since the last look, for instances that are idle beside work at both looks.

        Args:
            statuses: Instances that take in work.
            waiting: Models for which requests wait in queues of the mesh.
            kept: Instances that are kept for express requests.
        """
        idle = {each.instance_id for each in statuses if _is_idle_beside(each, waiting)}
        for name in idle & self._seen.keys():
            times = self.kept_s if name in kept else self.idle_s
            times[name] = times.get(name, 0.0) + now - self._seen[name]
        self._seen = dict.fromkeys(idle, now)


def waiting_models(waiting: dict[str, int]) -> frozenset[ModelName]:
    """Models for which requests wait, from the number of waiting requests of each queue."""
    return frozenset(
        model for queue, ready in waiting.items() if ready and (model := model_of(queue))
    )


def _is_idle_beside(status: InstanceStatus, waiting: Container[ModelName]) -> bool:
    is_idle = not (status.running or status.waiting or status.swapped_out or status.activating)
    models = [entry.model for entry in status.models]
    return is_idle and len(models) > 1 and any(model in waiting for model in models)
