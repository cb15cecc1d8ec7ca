"""Alarms of the estimator about instances that are slower than their peers."""

from collections.abc import Iterator, Sequence

import structlog

from services.estimator.telemetry_adapters import ProfileKey
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import InstanceId, UnixTime
from shared.contracts.estimates import AlarmKind, AlarmRaised
from shared.contracts.telemetry import IterationsObserved
from solver.prediction.alarms.alarm import AlarmChange, AlarmOptions
from solver.prediction.alarms.slow_instances import Judged, SlowInstances

log = structlog.get_logger()


class InstanceWatch:
    """
    Compares the pace of instances with the same (model, engine, device), and raises alarms.

    Args:
        options: Alarm thresholds, as multiples of the peers' times.
    """

    def __init__(self, options: AlarmOptions) -> None:
        self._options = options
        self._by_profile: dict[ProfileKey, SlowInstances] = {}
        self.num_raised = 0

    def observe(self, observed: IterationsObserved, multiples: Sequence[float]) -> None:
        """Record iteration times of an instance, as multiples of their predictions."""
        key = (observed.model, observed.engine, observed.device)
        if key not in self._by_profile:
            self._by_profile[key] = SlowInstances(self._options)
        self._by_profile[key].observe(observed.instance_id, multiples)

    def judge(self, now: UnixTime) -> Sequence[tuple[ProfileKey, Judged]]:
        """Alarms that were raised or cleared since the last call."""
        changes = [
            (key, judged)
            for key, instances in self._by_profile.items()
            for judged in instances.judge(now)
        ]
        self.num_raised += sum(each.change is AlarmChange.RAISED for _, each in changes)
        return changes

    @property
    def num_slow(self) -> int:
        """Number of slowness alarms in force."""
        return sum(len(instances.slow) for instances in self._by_profile.values())

    def levels(self) -> Iterator[tuple[ProfileKey, InstanceId, float]]:
        """
        Pace of each instance that has peers: its iteration times as a multiple of the peers' times.
        """
        for key, instances in self._by_profile.items():
            for name, level in instances.levels.items():
                yield key, name, level

    def slow(self) -> Iterator[tuple[ProfileKey, InstanceId, bool]]:
        """Whether the slowness alarm of each instance that has peers is in force."""
        for key, instances in self._by_profile.items():
            for name in instances.levels:
                yield key, name, name in instances.slow


async def raise_alarms(broker: Broker, watch: InstanceWatch, now: UnixTime) -> None:
    """Execute one round of alarms: publish raised alarms, and log raised and cleared alarms."""
    for (model, engine, device), judged in watch.judge(now):
        times = round(judged.level, 2)
        if judged.change is AlarmChange.CLEARED:
            log.info(
                "alarm.cleared",
                alarm=AlarmKind.INSTANCE_SLOW.value,
                instance_id=judged.instance_id,
                model=model,
                times_as_slow=times,
            )
            continue
        log.warning(
            "alarm.raised",
            alarm=AlarmKind.INSTANCE_SLOW.value,
            instance_id=judged.instance_id,
            model=model,
            times_as_slow=times,
        )
        alarm = AlarmRaised(
            alarm=AlarmKind.INSTANCE_SLOW,
            instance_id=judged.instance_id,
            at=now,
            detail=f"{times} times as slow as its peers on {model} ({engine}, {device})",
        )
        message = OutMessage.transient(alarm)
        await send_best_effort(broker, topology.TELEMETRY, topology.ALARM_KEY, message)
