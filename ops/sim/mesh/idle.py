"""Longest time for which an instance of the simulated mesh was idle beside waiting work."""

from collections.abc import Container, Iterable

from ops.sim.mesh.instance import MeshInstance
from ops.sim.mesh.lanes import MeshLanes
from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime


class IdleTimes:
    """
    Looks at instances with each plan; an instance is idle if it has no request and swaps no model.

    Work waits if some request waits from one look to the next, as for the leader's counter.
    """

    def __init__(self) -> None:
        self.longest_s: Seconds = 0.0
        self.longest_swaps = 0.0
        """The longest of these times, in times of the swap to the waiting model."""
        self._since: dict[InstanceId, UnixTime] = {}
        """Time of the first of the looks in a row at which an instance was idle beside work."""
        self._waited: set[int] = set()
        """Identities of the requests that waited at the last look."""

    def look(
        self,
        instances: Iterable[MeshInstance],
        lanes: MeshLanes,
        kept: Container[InstanceId],
        now: UnixTime,
    ) -> None:
        """Look at instances that are planned for; those that are *kept* do not count as idle."""
        waiting = list(lanes.requests())
        models = frozenset(each.model for each in waiting if id(each) in self._waited)
        for each in instances:
            if _is_busy(each) or each.instance_id in kept:
                self._since.pop(each.instance_id, None)
                continue
            since = self._since.setdefault(each.instance_id, now)
            swap_s = _shortest_swap_s(each, models, now)
            if swap_s is None:
                self._since[each.instance_id] = now
                continue
            self.longest_s = max(self.longest_s, now - since)
            self.longest_swaps = max(self.longest_swaps, (now - since) / swap_s)
        self._waited = {id(each) for each in waiting}


def _is_busy(instance: MeshInstance) -> bool:
    engine = instance.engine
    has_work = engine is not None and engine.num_running + engine.num_waiting > 0
    changes = instance.change is not None
    return bool(has_work or changes or instance.ahead or instance.swapped)


def _shortest_swap_s(
    instance: MeshInstance, models: frozenset[ModelName], now: UnixTime
) -> Seconds | None:
    """Shortest time to activate one of *models*; None if the instance can serve none of them."""
    able = models.intersection(instance.weights.models)
    return min((instance.weights.activate_s(model, now) for model in able), default=None)
