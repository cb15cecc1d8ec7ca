"""What an estimator counts."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.estimator.alarm_metrics import alarm_metrics
from services.estimator.calibration_metrics import calibration_metrics
from services.estimator.state import EstimatorState
from services.estimator.trees_metrics import trees_metrics

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
        yield from alarm_metrics(self._state.watch)
        yield from calibration_metrics(self._state)
        yield from trees_metrics(self._state)
        learners = self._state.learners
        yield GaugeMetricFamily(
            "headway_estimator_profiles", "Profiles known: (model, engine, device)", len(learners)
        )
        iterations = CounterMetricFamily(
            "headway_estimator_iterations", "Engine iterations learnt from", labels=PROFILE
        )
        error = GaugeMetricFamily(
            "headway_estimator_latency_error_ratio",
            "Median absolute relative error of the latency model, on iterations not seen before",
            labels=PROFILE,
        )
        high_error = GaugeMetricFamily(
            "headway_estimator_latency_error_p95_ratio",
            "95th percentile of the latency model's absolute relative error",
            labels=PROFILE,
        )
        bias = GaugeMetricFamily(
            "headway_estimator_latency_bias_ratio",
            "Median signed relative error of the latency model; negative predicts too little",
            labels=PROFILE,
        )
        prefill = GaugeMetricFamily(
            "headway_estimator_prefill_seconds", "Mean time to a first token", labels=PROFILE
        )
        for key, learner in tuple(learners.items()):
            iterations.add_metric(key, learner.fit.count)
            if (errors := learner.fit.errors) is not None:
                error.add_metric(key, errors.median)
                high_error.add_metric(key, errors.p95)
                bias.add_metric(key, errors.bias)
            if (moments := learner.prefill_s.value()) is not None:
                prefill.add_metric(key, moments.mean)
        yield from (iterations, error, high_error, bias, prefill)
