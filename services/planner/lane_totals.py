"""Totals of one grouper for one lane."""

import math
from dataclasses import dataclass, field

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import LaneTotal
from solver.planning.problem.arrival_curve import ArrivalCurve, RecentArrivals


@dataclass(slots=True)
class LaneCounter:
    """Totals that one grouper has counted for one lane."""

    prompt_tokens: int = 0
    expected_tokens: int = 0
    squared_prompt_tokens: float = 0.0
    interactive: int = 0
    time_left_s: Seconds = 0.0
    arrivals: ArrivalCurve = field(default_factory=ArrivalCurve)
    recent: RecentArrivals = field(default_factory=RecentArrivals)
    """
    Recent arrivals that were put into the lane itself, not into the overflow queue or an inbox.
    """
    routed: int = 0
    """Requests that were routed to an instance's inbox instead of the lane."""

    def add(self, request: QueuedRequest, *, at: UnixTime) -> None:
        """Count one request that enters the lane."""
        self.prompt_tokens += request.prompt_tokens
        self.expected_tokens += request.answer_tokens
        self.squared_prompt_tokens += float(request.prompt_tokens) ** 2
        self.interactive += request.slo.qos_class is QosClass.INTERACTIVE
        deadline_at = request.slo.planning_deadline_at(request.arrived_at)
        self.time_left_s += deadline_at - at if math.isfinite(deadline_at) else 0.0
        self.arrivals.add(at)

    def total(self, lane: str) -> LaneTotal:
        return LaneTotal(
            lane=lane,
            requests=self.arrivals.total,
            prompt_tokens=self.prompt_tokens,
            expected_tokens=self.expected_tokens,
            squared_prompt_tokens=self.squared_prompt_tokens,
            interactive=self.interactive,
            time_left_s=self.time_left_s,
            arrivals=self.arrivals.points(),
            routed=self.routed,
        )
