"""Comparison of predicted waits in lanes with actual waits, which follow from counts alone."""

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
"""Least time between two tracked forecasts of a lane; closer forecasts have the same errors."""
_LEAST_WAIT_S = 10.0
"""
Least wait that is tracked: arrivals and waiting requests are counted by different services, about a
second apart, so shorter waits cannot be measured.
"""
_MOST_FOLLOWED = 8
"""Maximum number of tracked wait forecasts per plan; each takes a quarter of a millisecond."""
_MOST_PENDING = 256
"""Maximum number of tracked wait forecasts per lane; the oldest forecasts are dropped."""
_FORGET_S = 7200.0
"""Time without a tracked forecast after which a lane that is not counted any more is dropped."""


class LaneCount(NamedTuple):
    """Number of requests that arrived in a lane since counting began, and number that wait now."""

    arrived: float
    waiting: float
    pulled_s: Seconds = 0.0
    """
    Time from the end of the wait in the lane to the start of service: instances first begin the
    work that they have pulled.
    """
    overflow: float = 0.0
    """
    Number of waiting requests in the lane's overflow queue; later requests of the lane are served
    before them.
    """


class _Pending(NamedTuple):
    predicted: PredictedTime
    turn_at_left: float
    """
    Number of requests that will have left the lane when a forecast's request is predicted to be
    served.
    """
    at: UnixTime


@dataclass(slots=True)
class _Lane:
    pending: deque[_Pending] = field(default_factory=lambda: deque(maxlen=_MOST_PENDING))
    predicted_at: UnixTime = float("-inf")
    arrived: float = 0.0
    in_order: bool = True


class LaneWaits:
    """
    Corrects forecasts of waits in lanes by the actual waits.

    A lane is first in, first out: the n-th request that arrives is the n-th request that leaves,
    and it is served after the work that was pulled before. The numbers of arrivals and of
    departures are known for every lane, so single requests are not tracked.

    Args:
        calibration: Learns from the outcomes; by default a new calibration.
    """

    def __init__(self, calibration: CompletionCalibration | None = None) -> None:
        self._calibration = calibration or CompletionCalibration()
        self._lanes: dict[str, _Lane] = {}

    def counted(self, counts: Mapping[str, LaneCount], now: UnixTime) -> None:
        """
        Learn from tracked forecasts whose requests have been served.

        The tracked forecasts of a lane are dropped when its number of arrivals decreases, because
        other groupers now count the lane. The forecasts are also dropped while the lane has
        overflow, because overflow requests leave the lane out of order.
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
        """Drop tracked forecasts after a gap in counting, because the actual waits are unknown."""
        for lane in self._lanes.values():
            lane.pending.clear()

    def predict(
        self, lanes: Sequence[str], waits: TimeDistribution, now: UnixTime
    ) -> TimeDistribution:
        """
        Corrected waits of requests that enter *lanes* now; some of these forecasts are tracked.

        Args:
            lanes: Names of lanes; only lanes that were counted before are tracked.
            waits: float64[len(lanes)]: means and variances of the waits, from the plan.
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
        """Accuracy of predicted waits; none before the first tracked request has been served."""
        return self._calibration.report()

    def _worth_following(
        self, lanes: Sequence[str], waits: TimeDistribution, now: UnixTime
    ) -> list[int]:
        """Indices of lanes with long waits, the least recently tracked lane first."""
        found = [
            (known.predicted_at, index)
            for index in np.flatnonzero(waits.mean_s >= _LEAST_WAIT_S).tolist()
            if (known := self._lanes.get(lanes[index])) is not None
            and known.in_order
            and now - known.predicted_at >= _APART_S
        ]
        return [index for _, index in sorted(found)[:_MOST_FOLLOWED]]
