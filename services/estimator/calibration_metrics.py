"""How predictions came out, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from services.estimator.state import EstimatorState
from solver.prediction.service_time import ALL_APPLICATIONS

_PROFILE = ("model", "engine", "device")


def calibration_metrics(state: EstimatorState) -> Iterator[Metric]:
    """Of latency models and waits by profile, of lengths by model, all applications together."""
    yield from _latency(state)
    yield from _waits(state)
    yield from _lengths(state)


def _latency(state: EstimatorState) -> Iterator[Metric]:
    bias = GaugeMetricFamily(
        "headway_estimator_latency_residual_ratio",
        "Mean of predicted less realised iteration times, over realised; negative: optimistic",
        labels=_PROFILE,
    )
    spread = GaugeMetricFamily(
        "headway_estimator_latency_residual_sd_ratio",
        "Standard deviation of these residuals",
        labels=_PROFILE,
    )
    for key, learner in tuple(state.learners.items()):
        if (calibration := learner.latency_calibration.value()) is not None:
            bias.add_metric(key, calibration.bias)
            spread.add_metric(key, calibration.spread)
    yield from (bias, spread)


def _waits(state: EstimatorState) -> Iterator[Metric]:
    bias = GaugeMetricFamily(
        "headway_estimator_wait_residual_seconds",
        "Mean of foretold less realised waits in lanes; negative: optimistic",
        labels=_PROFILE,
    )
    spread = GaugeMetricFamily(
        "headway_estimator_wait_residual_sd_seconds",
        "Standard deviation of these residuals",
        labels=_PROFILE,
    )
    coverage = GaugeMetricFamily(
        "headway_estimator_wait_coverage_ratio",
        "Share of waits within their foretold quantile",
        labels=(*_PROFILE, "level"),
    )
    for key, learner in tuple(state.learners.items()):
        if (calibration := learner.wait_calibration.value()) is not None:
            bias.add_metric(key, calibration.bias)
            spread.add_metric(key, calibration.spread)
            for level, share in calibration.coverage:
                coverage.add_metric((*key, str(level)), share)
    yield from (bias, spread, coverage)


def _lengths(state: EstimatorState) -> Iterator[Metric]:
    applications = GaugeMetricFamily(
        "headway_estimator_applications", "Applications told apart", labels=("model",)
    )
    mean = GaugeMetricFamily(
        "headway_estimator_output_tokens",
        "Mean length of answers, as they would be without a limit",
        labels=("model",),
    )
    bias = GaugeMetricFamily(
        "headway_estimator_output_residual_tokens",
        "Mean of predicted less realised answer lengths; negative: optimistic",
        labels=("model",),
    )
    spread = GaugeMetricFamily(
        "headway_estimator_output_residual_sd_tokens",
        "Standard deviation of these residuals",
        labels=("model",),
    )
    coverage = GaugeMetricFamily(
        "headway_estimator_output_coverage_ratio",
        "Share of answers within their predicted quantile, of those allowed to exceed it",
        labels=("model", "level"),
    )
    for model, lengths in tuple(state.lengths.items()):
        of_all = lengths.estimate(ALL_APPLICATIONS)
        applications.add_metric((model,), lengths.num_applications)
        if lengths.knows_something:
            mean.add_metric((model,), of_all.mean)
        if (calibration := of_all.calibration) is not None:
            bias.add_metric((model,), calibration.bias)
            spread.add_metric((model,), calibration.spread)
            for level, share in calibration.coverage:
                coverage.add_metric((model, str(level)), share)
    yield from (applications, mean, bias, spread, coverage)
