"""Comparison of predicted waits of lanes with actual ones, by counts only."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shared.contracts.base import Seconds, UnixTime
from solver.prediction.calibration.completion_calibration import (
    CalibrationReport,
    CompletionCalibration,
    PredictedTime,
)
from solver.prediction.time_distribution import TimeDistribution

_APART_S = 2.0
"""Least time between two tracked forecasts of a lane, because neighbouring ones err alike."""
_LEAST_WAIT_S = 10.0
"""
Shorter waits are not tracked: arrivals and waiting requests are counted by different services
at different times, about a second apart.
"""
_MOST_FOLLOWED = 8
"""
Tracked forecasts per plan: all of them train one calibration; each takes a quarter of a
millisecond.
"""
_MOST_PENDING = 256
"""Tracked forecasts per lane; the oldest are dropped."""
_FORGET_S = 7200.0


class LaneCount(NamedTuple):
    """Arrivals of a lane since counting began, and requests that wait there now."""

    arrived: float
    waiting: float
    pulled_s: Seconds = 0.0
    """Time from leaving the lane to the turn: work that instances have pulled but not begun."""
    overflow: float = 0.0
    """Waiting requests that must let later ones pass."""


class _Pending(NamedTuple):
    predicted: PredictedTime
    turn_at_left: float
    """Number of requests that have left the lane when the turn comes."""
    at: UnixTime


@dataclass(slots=True)
class _Lane:
    pending: deque[_Pending] = field(default_factory=lambda: deque(maxlen=_MOST_PENDING))
    predicted_at: UnixTime = float("-inf")
    arrived: float = 0.0
    in_order: bool = True


class LaneWaits:
    """
    Corrects forecasts of lanes by the actual duration of their queues.

    A lane is first in, first out: a request that comes as number n leaves it as number n, and has
    its turn after the work pulled before. Both counts are known of every lane; single requests are
    not tracked.

    Args:
        calibration: Learns from the outcomes; by default a new one.
    """

    def __init__(self, calibration: CompletionCalibration | None = None) -> None:
        self._calibration = calibration or CompletionCalibration()
        self._lanes: dict[str, _Lane] = {}

    def counted(self, counts: Mapping[str, LaneCount], now: UnixTime) -> None:
        """
        Learn from lanes whose turns have come.

        A decrease of a lane's arrivals means that other processes count it now: its tracked
        forecasts
        are dropped. They are also dropped while some requests of a lane let others pass.
        """
        for name, count in counts.items():
            lane = self._lanes.setdefault(name, _Lane())
            lane.in_order = not count.overflow
            if count.arrived < lane.arrived or not lane.in_order:
                lane.pending.clear()
            lane.arrived = count.arrived
            left = count.arrived - count.waiting
            while lane.pending and lane.pending[0].turn_at_left <= left:
                passed = lane.pending.popleft()
                self._calibration.observe(passed.predicted, now - passed.at + count.pulled_s)
        for name in [n for n, lane in self._lanes.items() if lane.predicted_at < now - _FORGET_S]:
            if name not in counts:
                del self._lanes[name]

    def give_up(self) -> None:
        """
        Drop tracked forecasts after a gap in counting, because the times of turns are unknown.
        """
        for lane in self._lanes.values():
            lane.pending.clear()

    def predict(
        self, lanes: Sequence[str], waits: TimeDistribution, now: UnixTime
    ) -> TimeDistribution:
        """
        Corrected waits of requests that come to *lanes* now; some forecasts are tracked.

        Args:
            lanes: Only those that were counted before are tracked.
            waits: float64[len(lanes)]: means and variances by the plan.
            now: Unix time.
        """
        predicted = self._calibration.predict(waits)
        for index in self._worth_following(lanes, waits, now):
            lane = self._lanes[lanes[index]]
            lane.predicted_at = now
            one = PredictedTime(predicted.raw[index], predicted.corrected[index])
            lane.pending.append(_Pending(one, lane.arrived, now))
        return predicted.corrected

    def report(self) -> CalibrationReport | None:
        """Accuracy of predicted waits; none before the first turn has come."""
        return self._calibration.report()

    def _worth_following(
        self, lanes: Sequence[str], waits: TimeDistribution, now: UnixTime
    ) -> list[int]:
        """Indices of long waits, starting with the lanes that were not tracked for longest."""
        found = [
            (known.predicted_at, index)
            for index in np.flatnonzero(waits.mean_s >= _LEAST_WAIT_S).tolist()
            if (known := self._lanes.get(lanes[index])) is not None
            and known.in_order
            and now - known.predicted_at >= _APART_S
        ]
        return [index for _, index in sorted(found)[:_MOST_FOLLOWED]]
