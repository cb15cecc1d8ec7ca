"""What an estimator counts."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.estimator.calibration_metrics import calibration_metrics
from services.estimator.state import EstimatorState
from shared.contracts.estimates import AlarmKind

PROFILE = ("model", "engine", "device")


class EstimatorMetrics(Collector):
    """
    Prometheus series of an estimator, read from its state when they are asked for.

    Args:
        registry: Where they are registered.
        state: The estimator's.
    """

    def __init__(self, registry: CollectorRegistry, state: EstimatorState) -> None:
        self._state = state
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The state now."""
        yield from self._watched()
        yield from calibration_metrics(self._state)
        learners = self._state.learners
        yield GaugeMetricFamily(
            "headway_estimator_profiles", "Profiles known: (model, engine, device)", len(learners)
        )
        iterations = CounterMetricFamily(
            "headway_estimator_iterations", "Engine iterations learnt from", labels=PROFILE
        )
        error = GaugeMetricFamily(
            "headway_estimator_latency_error_ratio",
            "Mean absolute relative error of the latency model, on iterations not seen before",
            labels=PROFILE,
        )
        prefill = GaugeMetricFamily(
            "headway_estimator_prefill_seconds", "Mean time to a first token", labels=PROFILE
        )
        for key, learner in tuple(learners.items()):
            iterations.add_metric(key, learner.fit.count)
            if (value := learner.fit.relative_error) is not None:
                error.add_metric(key, value)
            if (moments := learner.prefill_s.value()) is not None:
                prefill.add_metric(key, moments.mean)
        yield from (iterations, error, prefill)

    def _watched(self) -> Iterator[Metric]:
        watch, kind = self._state.watch, AlarmKind.INSTANCE_SLOW.value
        alarms = GaugeMetricFamily("headway_estimator_alarms", "Alarms in force", labels=("kind",))
        alarms.add_metric((kind,), watch.num_slow)
        raised = CounterMetricFamily(
            "headway_estimator_alarms_raised", "Alarms published", labels=("kind",)
        )
        raised.add_metric((kind,), watch.num_raised)
        pace = GaugeMetricFamily(
            "headway_estimator_instance_pace_ratio",
            "Times of an instance's iterations, as a multiple of those of its peers",
            labels=(*PROFILE, "instance_id"),
        )
        for key, instance_id, level in watch.levels():
            pace.add_metric((*key, instance_id), level)
        yield from (alarms, raised, pace)
