"""Alarms and what they rest on, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.estimator.alarms import InstanceWatch
from shared.contracts.estimates import AlarmKind


def alarm_metrics(watch: InstanceWatch) -> Iterator[Metric]:
    """Alarms by kind, and the pace of each instance that has peers."""
    kind = AlarmKind.INSTANCE_SLOW.value
    alarms = GaugeMetricFamily("headway_estimator_alarms", "Alarms in force", labels=("kind",))
    alarms.add_metric((kind,), watch.num_slow)
    raised = CounterMetricFamily(
        "headway_estimator_alarms_raised", "Alarms published", labels=("kind",)
    )
    raised.add_metric((kind,), watch.num_raised)
    pace = GaugeMetricFamily(
        "headway_estimator_instance_pace_ratio",
        "Times of an instance's iterations, as a multiple of those of its peers",
        labels=("model", "engine", "device", "instance_id"),
    )
    for key, instance_id, level in watch.levels():
        pace.add_metric((*key, instance_id), level)
    yield from (alarms, raised, pace)
