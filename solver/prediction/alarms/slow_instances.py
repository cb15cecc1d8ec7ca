"""Detection of instances that are slower than their peers at the same work."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from shared.contracts.base import InstanceId, UnixTime
from solver.prediction.alarms.alarm import Alarm, AlarmChange, AlarmOptions
from solver.prediction.calibration.pace import Pace

MEMORY_S = 60.0
"""Time without iterations after which an instance and its alarm are dropped."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A slowness alarm of an instance that was raised or cleared."""

    instance_id: InstanceId
    change: AlarmChange
    level: float
    """Pace of the instance over the median pace of its peers; 1 if its pace is no longer known."""


@dataclass(slots=True)
class _Watched:
    alarm: Alarm
    pace: Pace = field(default_factory=Pace)
    fresh: bool = False
    """True if the instance computed an iteration since the last call of `judge`."""
    seen_at: UnixTime = -math.inf


class SlowInstances:
    """
    Compares instances that should be equally fast, and finds the slow instances.

    The pace of an instance is the median ratio of measured to predicted times of its latest
    iterations, so that the work of an iteration and single pauses do not matter. The level of an
    instance is its pace over the median pace of its peers.

    Decided: no paper defines a slow instance. An instance is compared with its peers and not with
    the latency model alone, because the model is learned from all instances. If one of two
    instances is twice as slow, least squares result in the paces 0.8 and 1.7. So an instance
    without peers is never slow, and if most instances are slow, their pace is the norm.

    Args:
        options: Thresholds of levels.
    """

    def __init__(self, options: AlarmOptions) -> None:
        self._options = options
        self._watched: dict[InstanceId, _Watched] = {}
        self.levels: Mapping[InstanceId, float] = {}
        """Level of each instance at the last call of `judge`."""

    @property
    def slow(self) -> frozenset[InstanceId]:
        """Instances whose slowness alarm is raised."""
        return frozenset(name for name, each in self._watched.items() if each.alarm.raised)

    def observe(self, instance_id: InstanceId, multiples: Iterable[float]) -> None:
        """
        Learn from iterations of an instance.

        Args:
            multiples: Measured over predicted time of each iteration; only finite values above 0
                count.
        """
        watched = self._watched.setdefault(instance_id, _Watched(Alarm(self._options)))
        for multiple in multiples:
            if 0 < multiple < math.inf:
                watched.pace.observe(math.log(multiple))
                watched.fresh = True

    def judge(self, now: UnixTime) -> tuple[Judged, ...]:
        """
        Compare all instances with their peers; return the alarms that changed since the last call.
        """
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
        """Levels of the instances whose own pace and peers' pace are known."""
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
        """
        Drop instances that were silent for too long; return their alarms, which are now cleared.
        """
        for watched in self._watched.values():
            if watched.fresh:
                watched.seen_at = now
        silent = [n for n, each in self._watched.items() if not now - each.seen_at <= MEMORY_S]
        for name in silent:
            if self._watched.pop(name).alarm.raised:
                yield Judged(name, AlarmChange.CLEARED, 1.0)
