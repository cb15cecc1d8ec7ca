"""Samples of prefill times and trees learnt of them, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.estimator.state import EstimatorState

_PROFILE = ("model", "engine", "device")


def trees_metrics(state: EstimatorState) -> Iterator[Metric]:
    """What is kept, what is in force, and what was refused."""
    kept = GaugeMetricFamily(
        "headway_estimator_prefill_samples",
        "Samples of prefill times on disk, to fit trees by",
        labels=_PROFILE,
    )
    for key, count in state.samples.kept():
        kept.add_metric(key, count)
    refused = CounterMetricFamily(
        "headway_estimator_prefill_samples_refused",
        "Samples that are not learnt from, by the field at fault",
        labels=("reason",),
    )
    for reason, count in tuple(state.samples.refused.items()):
        refused.add_metric((reason,), count)
    yield from (kept, refused)
    yield from _in_force(state)


def _in_force(state: EstimatorState) -> Iterator[Metric]:
    version = GaugeMetricFamily(
        "headway_estimator_trees_version", "Version of the trees in force", labels=_PROFILE
    )
    made = GaugeMetricFamily(
        "headway_estimator_trees_made_timestamp_seconds",
        "When the trees in force were fitted",
        labels=_PROFILE,
    )
    coverage = GaugeMetricFamily(
        "headway_estimator_trees_coverage_ratio",
        "Share of samples within their quantile, of those not learnt of, when they were fitted",
        labels=(*_PROFILE, "level"),
    )
    for artefact in state.trees.in_force:
        version.add_metric(artefact.key, artefact.version)
        made.add_metric(artefact.key, artefact.created_at)
        for level, share in artefact.coverage:
            coverage.add_metric((*artefact.key, str(level)), share)
    refused = CounterMetricFamily(
        "headway_estimator_trees_refused",
        "Files of trees that were not put in force, by what is wrong with them",
        labels=("reason",),
    )
    for reason, count in tuple(state.trees.refused.items()):
        refused.add_metric((reason,), count)
    fits = CounterMetricFamily(
        "headway_estimator_fits",
        "Fits that the estimator had made, by what became of them",
        labels=("outcome",),
    )
    if state.fits is not None:
        for outcome, count in tuple(state.fits.outcomes.items()):
            fits.add_metric((outcome,), count)
    yield from (version, made, coverage, refused, fits)
