"""Which of several instances is slower than the others at the same work."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from shared.contracts.base import InstanceId, UnixTime
from solver.prediction.alarms import Alarm, AlarmChange, AlarmOptions
from solver.prediction.pace import Pace

MEMORY_S = 60.0
"""An instance that computed nothing for so long is forgotten, and its alarm with it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An alarm that changed."""

    instance_id: InstanceId
    change: AlarmChange
    level: float
    """Times as slow as its peers; 1 when there is nothing to tell it by any more."""


@dataclass(slots=True)
class _Watched:
    alarm: Alarm
    pace: Pace = field(default_factory=Pace)
    fresh: bool = False
    """Whether it computed something since it was judged."""
    seen_at: UnixTime = -math.inf


class SlowInstances:
    """
    Instances that are to be alike, and those of them that are not.

    An instance's pace is the median of its latest iterations' times as multiples of what one
    latency model predicts, so that neither what they computed nor single pauses matter. Its level
    is that pace as a multiple of its peers' median.

    Decided: no paper says when an instance is slow. Against its peers, and not against the model
    alone, since the model is learnt from all of them: of two instances, one twice as slow, least
    squares take the one for 0.8 and the other for 1.7 times as slow as it should be. So an
    instance without peers is never slow, and where most are, they are what is normal.

    Args:
        options: Thresholds of levels.
    """

    def __init__(self, options: AlarmOptions) -> None:
        self._options = options
        self._watched: dict[InstanceId, _Watched] = {}
        self.levels: Mapping[InstanceId, float] = {}
        """As last judged."""

    @property
    def slow(self) -> frozenset[InstanceId]:
        """Instances whose alarm is raised."""
        return frozenset(name for name, each in self._watched.items() if each.alarm.raised)

    def observe(self, instance_id: InstanceId, multiples: Iterable[float]) -> None:
        """
        An instance computed.

        Args:
            instance_id: Which one.
            multiples: Of each iteration, its time over the predicted one; only those above 0 and
                finite count.
        """
        watched = self._watched.setdefault(instance_id, _Watched(Alarm(self._options)))
        for multiple in multiples:
            if 0 < multiple < math.inf:
                watched.pace.observe(math.log(multiple))
                watched.fresh = True

    def judge(self, now: UnixTime) -> tuple[Judged, ...]:
        """Alarms that change by what came since the last time."""
        changes = [*self._forget(now)]
        self.levels = self._levels()
        for name, watched in self._watched.items():
            level = self.levels.get(name)
            if level is None:
                change = watched.alarm.reset()
            else:
                change = watched.alarm.observe(level) if watched.fresh else None
            watched.fresh = False
            if change is not None:
                changes.append(Judged(name, change, 1.0 if level is None else level))
        return tuple(changes)

    def _levels(self) -> dict[InstanceId, float]:
        """Of those whose pace and whose peers' is known."""
        paces = {
            name: pace
            for name, each in self._watched.items()
            if (pace := each.pace.value) is not None
        }
        levels = {}
        for name, pace in paces.items():
            peers = [other for peer, other in paces.items() if peer != name]
            if peers:
                levels[name] = math.exp(pace - median(peers))
        return levels

    def _forget(self, now: UnixTime) -> Iterator[Judged]:
        """Drop who has been silent for too long; the alarms that end by that."""
        for watched in self._watched.values():
            if watched.fresh:
                watched.seen_at = now
        silent = [n for n, each in self._watched.items() if not now - each.seen_at <= MEMORY_S]
        for name in silent:
            if self._watched.pop(name).alarm.raised:
                yield Judged(name, AlarmChange.CLEARED, 1.0)
