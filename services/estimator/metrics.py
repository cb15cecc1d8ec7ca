"""Prometheus metrics of an estimator."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry

from services.estimator.state import EstimatorState, Learner
from shared.contracts.estimates import AlarmKind, Calibration, Moments
from shared.runtime.metrics import Series, StateCollector, counter, gauge
from solver.prediction.latency.latency_model import PredictionErrors
from solver.prediction.latency.service_time import ALL_APPLICATIONS
from solver.prediction.lengths.decode_lengths import DecodeLengths

PROFILE = ("model", "engine", "device")
Labels = tuple[str, ...]
Sample = tuple[Labels, float]
Read = Callable[[EstimatorState], Iterable[Sample]]
Coverage = Iterable[tuple[float, float]]
T = TypeVar("T")


def estimator_metrics(registry: CollectorRegistry, state: EstimatorState) -> None:
    """Register the metrics of *state*."""
    StateCollector(registry, lambda: state, SERIES)


def _known(
    members: Iterable[tuple[Labels, T]], value: Callable[[T], float | None]
) -> Iterator[Sample]:
    """Return one sample for each of *members* whose value is known."""
    for labels, member in tuple(members):
        if (known := value(member)) is not None:
            yield labels, known


def _by_profile(value: Callable[[Learner], float | None]) -> Read:
    return lambda state: _known(state.learners.items(), value)


def _by_model(value: Callable[[DecodeLengths], float | None]) -> Read:
    return lambda state: _known(_lengths(state), value)


def _lengths(state: EstimatorState) -> Iterator[tuple[Labels, DecodeLengths]]:
    return (((model,), lengths) for model, lengths in state.lengths.items())


def _field(estimate: PredictionErrors | Calibration | Moments | None, name: str) -> float | None:
    """The field *name* of an estimate; None without an estimate."""
    return None if estimate is None else float(getattr(estimate, name))


def _length_calibration(lengths: DecodeLengths) -> Calibration | None:
    return lengths.estimate(ALL_APPLICATIONS).calibration


def _by_level(judged: Iterable[tuple[Labels, Coverage]]) -> Iterator[Sample]:
    """Return one sample for each quantile level of each entry of *judged*."""
    for labels, coverage in tuple(judged):
        for level, share in coverage:
            yield (*labels, str(level)), share


def _alarm(count: Callable[[EstimatorState], int]) -> Read:
    return lambda state: [((AlarmKind.INSTANCE_SLOW.value,), count(state))]


def _counts(of: Callable[[EstimatorState], Iterable[tuple[str, int]]]) -> Read:
    return lambda state: [((name,), count) for name, count in tuple(of(state))]


SERIES: tuple[Series[EstimatorState], ...] = (
    gauge(
        "headway_estimator_alarms",
        "Alarms that are raised and not cleared",
        _alarm(lambda state: state.watch.num_slow),
        "kind",
    ),
    counter(
        "headway_estimator_alarms_raised",
        "Published alarms",
        _alarm(lambda state: state.watch.num_raised),
        "kind",
    ),
    gauge(
        "headway_estimator_instance_pace_ratio",
        "Iteration times of an instance as a multiple of those of its peers",
        lambda state: (((*key, instance), level) for key, instance, level in state.watch.levels()),
        *(*PROFILE, "instance_id"),
    ),
    gauge(
        "headway_estimator_instance_slow",
        "1 while the alarm about the slowness of an instance is in force",
        lambda state: (
            ((*key, instance), is_slow) for key, instance, is_slow in state.watch.slow()
        ),
        *(*PROFILE, "instance_id"),
    ),
    gauge(
        "headway_estimator_latency_residual_ratio",
        "Mean relative error of predicted iteration times; negative if predicted too short",
        _by_profile(lambda learner: _field(learner.latency_calibration.value(), "bias")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_latency_residual_sd_ratio",
        "Standard deviation of the iteration time residuals",
        _by_profile(lambda learner: _field(learner.latency_calibration.value(), "spread")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_wait_residual_seconds",
        "Mean of predicted minus actual waits in lanes; negative if predicted too short",
        _by_profile(lambda learner: _field(learner.wait_calibration.value(), "bias")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_wait_residual_sd_seconds",
        "Standard deviation of the wait residuals",
        _by_profile(lambda learner: _field(learner.wait_calibration.value(), "spread")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_wait_coverage_ratio",
        "Share of waits within their predicted quantile",
        lambda state: _by_level(
            (key, calibration.coverage)
            for key, learner in state.learners.items()
            if (calibration := learner.wait_calibration.value()) is not None
        ),
        *(*PROFILE, "level"),
    ),
    gauge(
        "headway_estimator_applications",
        "Applications whose answer lengths are learnt separately",
        _by_model(lambda lengths: lengths.num_applications),
        "model",
    ),
    gauge(
        "headway_estimator_output_tokens",
        "Mean length of answers without a token limit",
        _by_model(
            lambda lengths: (
                lengths.estimate(ALL_APPLICATIONS).mean if lengths.has_observations else None
            )
        ),
        "model",
    ),
    gauge(
        "headway_estimator_output_residual_tokens",
        "Mean of predicted minus actual answer lengths; negative if predicted too short",
        _by_model(lambda lengths: _field(_length_calibration(lengths), "bias")),
        "model",
    ),
    gauge(
        "headway_estimator_output_residual_sd_tokens",
        "Standard deviation of the answer length residuals",
        _by_model(lambda lengths: _field(_length_calibration(lengths), "spread")),
        "model",
    ),
    gauge(
        "headway_estimator_output_coverage_ratio",
        "Share of answers within their predicted quantile; answers with a lower limit do not count",
        lambda state: _by_level(
            (model, calibration.coverage)
            for model, lengths in _lengths(state)
            if (calibration := _length_calibration(lengths)) is not None
        ),
        *("model", "level"),
    ),
    gauge(
        "headway_estimator_prefill_samples",
        "Samples of prefill times on disk for fitting trees",
        lambda state: state.samples.kept(),
        *PROFILE,
    ),
    counter(
        "headway_estimator_prefill_samples_refused",
        "Samples of prefill times that were refused, by the invalid field",
        _counts(lambda state: state.samples.refused.items()),
        "reason",
    ),
    gauge(
        "headway_estimator_trees_version",
        "Version of the trees in force",
        lambda state: ((each.key, each.version) for each in state.trees.in_force),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_trees_made_timestamp_seconds",
        "Unix time at which the trees in force were fitted",
        lambda state: ((each.key, each.created_at) for each in state.trees.in_force),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_trees_coverage_ratio",
        "Share of held-out samples within their quantile when the trees were fitted",
        lambda state: _by_level((each.key, each.coverage) for each in state.trees.in_force),
        *(*PROFILE, "level"),
    ),
    counter(
        "headway_estimator_trees_refused",
        "Tree files that were refused, by reason",
        _counts(lambda state: state.trees.refused.items()),
        "reason",
    ),
    counter(
        "headway_estimator_fits",
        "Fits started by the estimator, by outcome",
        _counts(lambda state: () if state.fits is None else state.fits.outcomes.items()),
        "outcome",
    ),
    gauge(
        "headway_estimator_profiles",
        "Known profiles, one for each (model, engine, device)",
        lambda state: len(state.learners),
    ),
    counter(
        "headway_estimator_iterations",
        "Engine iterations from which the latency model was learnt",
        _by_profile(lambda learner: learner.fit.count),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_latency_error_ratio",
        "Median absolute relative error of the latency model on unseen iterations",
        _by_profile(lambda learner: _field(learner.fit.errors, "median")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_latency_error_p95_ratio",
        "95th percentile of the latency model's absolute relative error",
        _by_profile(lambda learner: _field(learner.fit.errors, "p95")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_latency_bias_ratio",
        "Median signed relative error of the latency model; negative is an underestimate",
        _by_profile(lambda learner: _field(learner.fit.errors, "bias")),
        *PROFILE,
    ),
    gauge(
        "headway_estimator_prefill_seconds",
        "Mean time from a request's submission to the engine to its first token",
        _by_profile(lambda learner: _field(learner.prefill_s.value(), "mean")),
        *PROFILE,
    ),
)
"""All metric families of the estimator; prediction errors are exponentially weighted means."""
