"""The decodes of one engine, computed by counting instead of iterating."""

import heapq
import math

from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import RequestId, Seconds
from solver.scheduling.engine.latency import LatencyTable


class Decodes:
    """
    The requests of one engine that get a token in every iteration.

    A request's counters are valid only after `runs` or `leave`. A heap sorts the requests by the
    iteration in which they end.
    """

    def __init__(self, latency: LatencyTable) -> None:
        self.context_tokens = 0
        self._latency = latency
        self._step = 0
        self._runs: dict[RequestId, MeshRequest] = {}
        self._ends: list[tuple[int, int, MeshRequest]] = []

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: MeshRequest) -> bool:
        return self._runs.get(run.request_id) is run

    def runs(self) -> list[MeshRequest]:
        """All decoding requests with valid counters, in the order in which they joined."""
        for run in self._runs.values():
            self._settle(run)
        return list(self._runs.values())

    def last(self) -> MeshRequest:
        """The request that joined last; at least one request must be decoding."""
        return self._runs[next(reversed(self._runs))]

    @property
    def pace_s(self) -> Seconds:
        """Duration of an iteration that only computes decodes."""
        return self._latency.predict_s(max(1, len(self)), 0.0, self.context_tokens)

    def join(self, run: MeshRequest) -> None:
        """Add the request *run*, which gets a token in the next iteration."""
        run.joined_step = self._step
        run.end_step = self._step + run.output_tokens - run.num_output_tokens
        self._runs[run.request_id] = run
        self.context_tokens += run.num_computed_tokens
        heapq.heappush(self._ends, (run.end_step, run.place, run))

    def leave(self, run: MeshRequest) -> None:
        """Remove the request *run*, and make its counters valid."""
        self._settle(run)
        del self._runs[run.request_id]
        self.context_tokens -= run.num_computed_tokens

    def advance(self, count: int) -> list[MeshRequest]:
        """
        Advance all requests by *count* iterations; remove and return requests that have their last
        token.
        """
        self.context_tokens += len(self) * count
        self._step += count
        ended = []
        while (end := self._next_end()) is not None and end[0] <= self._step:
            heapq.heappop(self._ends)
            self.leave(end[2])
            ended.append(end[2])
        return ended

    def steps_left(self) -> int:
        """
        Number of iterations until the first request ends; at least one request must be decoding.
        """
        end = self._next_end()
        assert end is not None
        return end[0] - self._step

    def steps_s(self, count: int) -> Seconds:
        """Duration of *count* iterations with decodes only; the context grows in each iteration."""
        growth_s = self._latency.context_s * len(self)
        return count * self.pace_s + growth_s * count * (count - 1) / 2

    def steps_within(self, seconds: Seconds) -> int:
        """
        Number of iterations with decodes only, up to the first that ends at *seconds* or later.
        """
        growth_s = self._latency.context_s * len(self)
        half_s = self.pace_s - growth_s / 2
        if growth_s <= 0:
            return max(1, math.ceil(seconds / half_s))
        root_s = math.sqrt(half_s * half_s + 2 * growth_s * seconds)
        return max(1, math.ceil((root_s - half_s) / growth_s))

    def _next_end(self) -> tuple[int, int, MeshRequest] | None:
        """Heap entry of the request that ends first; entries of removed requests are dropped."""
        while self._ends:
            step, _, run = self._ends[0]
            if run in self and run.end_step == step:
                return self._ends[0]
            heapq.heappop(self._ends)
        return None

    def _settle(self, run: MeshRequest) -> None:
        """Update the counters of the request *run*."""
        steps = self._step - run.joined_step
        run.joined_step = self._step
        run.num_computed_tokens += steps
        run.num_output_tokens += steps
