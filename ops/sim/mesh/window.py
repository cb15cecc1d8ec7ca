"""The virtual queue in force, and the pulls of its instance."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ops.sim.mesh.conduct import PullKey
from ops.sim.mesh.lanes import MeshLanes
from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import ModelName
from shared.contracts.plans import Segment


@dataclass(slots=True)
class _Stretch:
    segment: Segment
    left: dict[str, int]
    """Lane -> remaining quota of the segment, in requests."""


class QueueInForce:
    """
    The segments of the last plan, with their remaining quotas.

    Args:
        lanes: Queues of waiting requests.
        key: Sort key of the heads of a segment's lanes; the smallest is pulled next.
    """

    def __init__(self, lanes: MeshLanes, key: PullKey) -> None:
        self._lanes = lanes
        self._key = key
        self._stretches: deque[_Stretch] = deque()

    def follow(self, segments: Iterable[Segment]) -> None:
        """Adopt a new plan for the instance."""
        self._stretches = deque(
            _Stretch(segment, {each.lane: each.quota for each in segment.lanes})
            for segment in segments
        )

    def segments(self) -> tuple[Segment, ...]:
        """Remaining segments of the virtual queue, head first."""
        return tuple(stretch.segment for stretch in self._stretches)

    def drop_served(self) -> None:
        """Drop segments without waiting requests from the head of the virtual queue."""
        while self._stretches and self._next_lane(self._stretches[0]) is None:
            self._stretches.popleft()

    def pull_head(self) -> MeshRequest | None:
        """Pull the next request of the head segment."""
        return self._pull(self._stretches[0]) if self._stretches else None

    def pull_urgent(self) -> MeshRequest | None:
        """
        Pull the request of `pull_head`, or a more urgent request of the same model from any queue.

        So instances with the same model share urgent work, and no instance begins less urgent work
        than planned.
        """
        if not self._stretches:
            return None
        stretch = self._stretches[0]
        planned = self._next_lane(stretch)
        if planned is None:
            return None
        lane = self._least([planned, *self._lanes.of_model(stretch.segment.model)])
        if lane is None or lane == planned:
            return self._pull(stretch)
        return self._lanes.take(lane)

    def pull_any(self) -> MeshRequest | None:
        """Pull the next request of the first segment that has a waiting request."""
        for stretch in self._stretches:
            request = self._pull(stretch)
            if request is not None:
                return request
        return None

    def pull_spare(self, model: ModelName) -> MeshRequest | None:
        """
        Pull the next request of *model* from any queue, so that no instance is idle while requests
        wait.
        """
        lane = self._least(self._lanes.of_model(model))
        return None if lane is None else self._lanes.take(lane)

    def _pull(self, stretch: _Stretch) -> MeshRequest | None:
        lane = self._next_lane(stretch)
        if lane is None:
            return None
        stretch.left[lane] -= 1
        return self._lanes.take(lane)

    def _next_lane(self, stretch: _Stretch) -> str | None:
        return self._least([lane for lane, left in stretch.left.items() if left > 0])

    def _least(self, names: Iterable[str]) -> str | None:
        heads = [(name, head) for name in names if (head := self._lanes.head(name)) is not None]
        if not heads:
            return None
        return min(heads, key=lambda item: (self._key(item[1]), item[1].place_in_traffic))[0]
