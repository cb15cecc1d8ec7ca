"""Foretold waits of lanes against what came, by nothing but counts."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shared.contracts.base import Seconds, UnixTime
from solver.prediction.completion_calibration import (
    CalibrationReport,
    CompletionCalibration,
    Foretold,
)
from solver.prediction.time_distribution import TimeDistribution

_APART_S = 2.0
"""Least time between two forecasts of a lane that are followed up: neighbours err alike."""
_LEAST_WAIT_S = 10.0
"""
Shorter waits are not followed up: arrivals and waiting requests are counted by different services
at different times, a second or so apart.
"""
_MOST_FOLLOWED = 8
"""Of a plan: all of them teach one calibration, and one takes a quarter of a millisecond."""
_MOST_PENDING = 256
"""Of a lane; the oldest are given up."""
_FORGET_S = 7200.0


class LaneCount(NamedTuple):
    """What has come to a lane since anybody counted, and what waits there now."""

    arrived: float
    waiting: float
    pulled_s: Seconds = 0.0
    """From leaving the lane to the turn: instances have pulled so much that has not begun."""
    overflow: float = 0.0
    """Of those that wait, who has to let later ones pass."""


class _Pending(NamedTuple):
    told: Foretold
    turn_at_left: float
    """So many have left the lane when the turn comes."""
    at: UnixTime


@dataclass(slots=True)
class _Lane:
    pending: deque[_Pending] = field(default_factory=lambda: deque(maxlen=_MOST_PENDING))
    told_at: UnixTime = float("-inf")
    arrived: float = 0.0
    in_order: bool = True


class LaneWaits:
    """
    Corrects forecasts of lanes by how long their queues really took.

    A lane is first in, first out: who comes when so many have arrived leaves it when as many
    have, and has its turn after what was pulled before. Both are known of every lane, and of no
    request more than that.

    Args:
        calibration: Learns; by default one of its own.
    """

    def __init__(self, calibration: CompletionCalibration | None = None) -> None:
        self._calibration = calibration or CompletionCalibration()
        self._lanes: dict[str, _Lane] = {}

    def counted(self, counts: Mapping[str, LaneCount], now: UnixTime) -> None:
        """
        Learn from lanes whose turns have come.

        A lane whose arrivals have become fewer is counted by others than before: what was
        foretold of it is given up. So is that of a lane while some of it let others pass.
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
                self._calibration.observe(passed.told, now - passed.at + count.pulled_s)
        for name in [n for n, lane in self._lanes.items() if lane.told_at < now - _FORGET_S]:
            if name not in counts:
                del self._lanes[name]

    def give_up(self) -> None:
        """Nobody has counted for a while: when turns came in it is not known."""
        for lane in self._lanes.values():
            lane.pending.clear()

    def foretell(
        self, lanes: Sequence[str], waits: TimeDistribution, now: UnixTime
    ) -> TimeDistribution:
        """
        Waits of who comes to *lanes* now, corrected; some are followed up.

        Args:
            lanes: Of which those are followed up that were counted before.
            waits: float64[len(lanes)]: means and variances as the plan has them.
            now: Unix time.
        """
        told = self._calibration.foretell(waits)
        for index in self._worth_following(lanes, waits, now):
            lane = self._lanes[lanes[index]]
            lane.told_at = now
            one = Foretold(told.raw[index], told.corrected[index])
            lane.pending.append(_Pending(one, lane.arrived, now))
        return told.corrected

    def report(self) -> CalibrationReport | None:
        """How well waits were foretold; none before the first turn has come."""
        return self._calibration.report()

    def _worth_following(
        self, lanes: Sequence[str], waits: TimeDistribution, now: UnixTime
    ) -> list[int]:
        """Indices of long waits, of the lanes first that were not followed up for longest."""
        found = [
            (known.told_at, index)
            for index in np.flatnonzero(waits.mean_s >= _LEAST_WAIT_S).tolist()
            if (known := self._lanes.get(lanes[index])) is not None
            and known.in_order
            and now - known.told_at >= _APART_S
        ]
        return [index for _, index in sorted(found)[:_MOST_FOLLOWED]]
