"""Lanes of the simulated mesh, and the lane statistics that groupers publish."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import ModelName, UnixTime
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.qos import Importance
from solver.planning.lanes import band_lower_edge_s, lane_for
from solver.planning.problem.arrival_curve import ArrivalCurve
from solver.planning.problem.grouping import LaneStatistics, Spread
from solver.planning.reserved_capacity import LaneArrivals

_LAYOUT = LaneLayout()


class AnswerLengths:
    """
    Mean and standard deviation of answer lengths by class, as learned from earlier traffic.

    Source: QLM §6, offline workload profiling.
    """

    def __init__(self, requests: Iterable[MeshRequest]) -> None:
        outputs: dict[str, list[int]] = {}
        for request in requests:
            outputs.setdefault(request.arrival.class_name, []).append(request.output_tokens)
        self._spreads = {
            name: Spread(float(np.mean(values)), float(np.std(values)))
            for name, values in outputs.items()
        }

    def of(self, request: MeshRequest) -> Spread:
        """Answer lengths of the request's class."""
        return self._spreads[request.arrival.class_name]


@dataclass(slots=True)
class _Lane:
    """One lane: its main queue, its companion queue, and sums over all arrivals."""

    key: LaneKey
    queue: deque[MeshRequest] = field(default_factory=deque)
    resumed: deque[MeshRequest] = field(default_factory=deque)
    """Evicted or returned requests, which are served before `queue`."""
    curve: ArrivalCurve = field(default_factory=ArrivalCurve)
    interactive: int = 0
    """Number of requests of the lane with a TTFT target."""
    left_s: float = 0.0
    prompt: float = 0.0
    squared_prompt: float = 0.0
    output: float = 0.0
    squared_output: float = 0.0

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.resumed)

    def head(self) -> MeshRequest | None:
        """The request of the lane that is served next."""
        if self.resumed:
            return self.resumed[0]
        return self.queue[0] if self.queue else None


class MeshLanes:
    """
    All lanes of the simulated mesh; each lane is first in, first out.

    Args:
        answers: Expected answer lengths.
        layout: Rules that divide requests into lanes.
    """

    def __init__(self, answers: AnswerLengths, layout: LaneLayout = _LAYOUT) -> None:
        self.answers = answers
        self._layout = layout
        self._lanes: dict[str, _Lane] = {}
        self.num_waiting = 0

    def put(self, request: MeshRequest, now: UnixTime) -> str:
        """Put a new *request* into its lane; return the lane's name."""
        work_tokens = request.arrival.prompt_tokens + self.answers.of(request).mean
        request.work_tokens = work_tokens
        key = lane_for(
            model=request.model,
            importance=request.arrival.importance,
            time_left_s=request.deadline_at - now,
            work_tokens=work_tokens,
            layout=self._layout,
        )
        self._enqueue(request, key, request.deadline_at - now, now)
        return request.lane

    def put_back(self, requests: Sequence[MeshRequest]) -> None:
        """Put the requests *requests* back at the front of their lanes, in the given order."""
        for request in reversed(requests):
            self._lanes[request.lane].resumed.appendleft(request)
        self.num_waiting += len(requests)

    def relegate(self, request: MeshRequest, now: UnixTime) -> None:
        """Relegate *request*: put it behind the feasible requests of its lane."""
        request.relegated = True
        key = LaneKey.of(
            self._layout,
            model=request.model,
            importance=Importance.LOW,
            band=self._layout.best_effort_band,
            work=0,
        )
        self._enqueue(request, key, math.inf, now)

    def head(self, lane: str) -> MeshRequest | None:
        """The request of the lane *lane* that is served next."""
        found = self._lanes.get(lane)
        return None if found is None else found.head()

    def take(self, lane: str) -> MeshRequest:
        """Remove and return the first request of *lane*, which must not be empty."""
        found = self._lanes[lane]
        self.num_waiting -= 1
        return found.resumed.popleft() if found.resumed else found.queue.popleft()

    def requests(self) -> Iterator[MeshRequest]:
        """All waiting requests."""
        for lane in self._lanes.values():
            yield from _in_order(lane)

    def of_model(self, model: str) -> list[str]:
        """Lanes of *model* with waiting requests."""
        return [n for n, lane in self._lanes.items() if lane.key.model == model and lane.waiting]

    def waiting_models(self) -> dict[ModelName, bool]:
        """Model for which requests wait -> whether one of them has a deadline."""
        found: dict[ModelName, bool] = {}
        for lane in self._lanes.values():
            if lane.waiting:
                has_deadline = lane.key.band != self._layout.best_effort_band
                found[lane.key.model] = found.get(lane.key.model, False) or has_deadline
        return found

    def statistics(self) -> list[LaneStatistics]:
        """Statistics of waiting requests for the leader, by lane, sorted by the lanes' keys."""
        waiting = [lane for lane in self._lanes.values() if lane.waiting]
        return [_statistics(lane) for lane in sorted(waiting, key=lambda lane: lane.key)]

    def arrivals(self) -> Iterator[LaneArrivals]:
        """Arrivals of every lane, including requests that no longer wait."""
        for lane in self._lanes.values():
            yield LaneArrivals(
                model=lane.key.model,
                importance=lane.key.importance,
                least_left_s=band_lower_edge_s(lane.key.band, self._layout),
                arrivals=lane.curve.points(),
                tokens=(lane.prompt + lane.output) / lane.curve.total,
            )

    def first(self, count: int) -> Mapping[str, list[MeshRequest]]:
        """Up to *count* requests of each lane in order of service."""
        return {
            name: [request for _, request in zip(range(count), _in_order(lane), strict=False)]
            for name, lane in self._lanes.items()
            if lane.waiting
        }

    def key(self, lane: str) -> LaneKey:
        return self._lanes[lane].key

    def _enqueue(self, request: MeshRequest, key: LaneKey, left_s: float, now: UnixTime) -> None:
        request.lane = key.queue_name
        spread, prompt = self.answers.of(request), request.num_prefill_tokens
        lane = self._lanes.setdefault(request.lane, _Lane(key))
        lane.queue.append(request)
        lane.curve.add(now)
        lane.interactive += request.interactive
        lane.left_s += left_s
        lane.prompt += prompt
        lane.squared_prompt += prompt**2
        lane.output += spread.mean
        lane.squared_output += spread.mean**2 + spread.sd**2
        self.num_waiting += 1


def _in_order(lane: _Lane) -> Iterable[MeshRequest]:
    yield from lane.resumed
    yield from lane.queue


def _statistics(lane: _Lane) -> LaneStatistics:
    num = max(1, lane.curve.total)
    prompt, output = lane.prompt / num, lane.output / num
    return LaneStatistics(
        key=lane.key,
        waiting=lane.waiting,
        arrivals=lane.curve.points(),
        time_left_s=lane.left_s / num,
        interactive=2 * lane.interactive > num,
        prompt_tokens=Spread(prompt, math.sqrt(max(0.0, lane.squared_prompt / num - prompt**2))),
        output_tokens=Spread(output, math.sqrt(max(0.0, lane.squared_output / num - output**2))),
    )
