"""Longest time for which an instance of the simulated mesh was idle beside waiting work."""

from collections.abc import Container, Iterable

from ops.sim.mesh.instance import MeshInstance
from ops.sim.mesh.lanes import MeshLanes
from shared.contracts.base import InstanceId, Seconds, UnixTime


class IdleTimes:
    """
    Looks at instances with each plan; an instance is idle if it has no request and swaps no model.
    """

    def __init__(self) -> None:
        self.longest_s: Seconds = 0.0
        self.longest_swaps = 0.0
        """The longest of these times, in times of the swap to the waiting model."""
        self._since: dict[InstanceId, UnixTime] = {}
        """Time of the first of the looks in a row at which an instance was idle beside work."""

    def look(
        self,
        instances: Iterable[MeshInstance],
        lanes: MeshLanes,
        kept: Container[InstanceId],
        now: UnixTime,
    ) -> None:
        """Look at instances that are planned for; those that are *kept* do not count as idle."""
        for each in instances:
            swap_s = _shortest_swap_s(each, lanes, now)
            if swap_s is None or each.instance_id in kept:
                self._since.pop(each.instance_id, None)
                continue
            idle_s = now - self._since.setdefault(each.instance_id, now)
            self.longest_s = max(self.longest_s, idle_s)
            self.longest_swaps = max(self.longest_swaps, idle_s / swap_s)


def _shortest_swap_s(instance: MeshInstance, lanes: MeshLanes, now: UnixTime) -> Seconds | None:
    """Shortest time to activate a model with waiting work; None if the instance is not idle."""
    engine = instance.engine
    has_work = engine is not None and engine.num_running + engine.num_waiting > 0
    if has_work or instance.change is not None or instance.ahead or instance.swapped:
        return None
    waiting = [model for model in instance.weights.models if lanes.of_model(model)]
    return min((instance.weights.activate_s(model, now) for model in waiting), default=None)
