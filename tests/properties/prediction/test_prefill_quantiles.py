"""Prefill quantiles, their corrections and the monitor, for arbitrary observations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.routing import Residual
from solver.prediction.calibration.buckets import Bucket
from solver.prediction.calibration.coverage import ALL, CoverageMonitor
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.calibration.residuals import Residuals
from solver.prediction.prefill.features import FEATURES
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_trees import Prediction, QuantileTrees
from tests.prefill_times import NOMINAL, matrix_of, requests_of, times_of

LEVELS = (0.5, 0.9, 0.95)
buckets = st.builds(Bucket, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))
times = st.floats(allow_nan=True, allow_infinity=True)
rows = st.lists(
    st.lists(times, min_size=len(FEATURES), max_size=len(FEATURES)), min_size=1, max_size=16
)
sound_times = st.floats(1e-4, 1e3)


@pytest.fixture(scope="module")
def trees() -> QuantileTrees:
    trained = requests_of(NOMINAL, 600, seed=1)
    return fit_quantile_trees(matrix_of(trained), times_of(trained), levels=LEVELS)


def a_prediction(quantiles_s: list[float], mean_s: float) -> Prediction:
    return Prediction(np.array([sorted(quantiles_s)]), np.array([mean_s]))


predictions = st.builds(a_prediction, st.lists(sound_times, min_size=3, max_size=3), sound_times)


def a_calibration() -> BucketedCalibration:
    return BucketedCalibration(LEVELS, model_version="1", origin="here", window=60, least=20)


@given(rows)
def test_quantiles_rise_and_are_finite_for_any_features(
    trees: QuantileTrees, features: list[list[float]]
):
    prediction = trees.predict(np.array(features))

    assert np.all(np.isfinite(prediction.quantiles_s))
    assert np.all(prediction.quantiles_s >= 0)
    assert np.all(np.diff(prediction.quantiles_s, axis=1) >= 0)
    assert np.all(np.isfinite(prediction.mean_s) & (prediction.mean_s >= 0))


@given(rows)
def test_a_candidate_is_predicted_equally_alone_and_among_others(
    trees: QuantileTrees, features: list[list[float]]
):
    together = trees.predict(np.array(features))
    for row, each in enumerate(features):
        alone = trees.predict(np.array([each]))

        assert alone.quantiles_s[0].tolist() == together.quantiles_s[row].tolist()
        assert alone.mean_s[0] == together.mean_s[row]


@given(st.lists(st.tuples(buckets, predictions, times), max_size=120), buckets, predictions)
def test_corrections_are_finite_after_any_observations(
    seen: list[tuple[Bucket, Prediction, float]], bucket: Bucket, prediction: Prediction
):
    calibration = a_calibration()
    for each, predicted, actual_s in seen:
        calibration.observe(each, predicted, actual_s)
    corrected = calibration.correct(prediction, [bucket])

    assert np.all(np.isfinite(corrected.quantiles_s) & (corrected.quantiles_s >= 0))
    assert np.all(np.diff(corrected.quantiles_s) >= 0)
    assert np.all(np.isfinite(corrected.mean_s) & (corrected.mean_s >= 0))


@given(st.lists(st.floats(-5, 5), min_size=19, max_size=80))
def test_the_window_has_its_coverage_after_correction(scores: list[float]):
    """The correction uses the rank of the next request, so coverage is at least the level."""
    residuals = Residuals(LEVELS)
    for number, score in enumerate(scores):
        residuals.add(Residual(number, (0, 0, 0), 0.0, (score,) * len(LEVELS), 1.0, 1.0))
    corrections = np.log(residuals.factors()[:-1]) + 1e-9

    assert np.all(np.mean(np.array(scores)[:, None] <= corrections, axis=0) >= LEVELS)


@given(st.lists(st.tuples(buckets, predictions, sound_times), min_size=1, max_size=60))
def test_adopting_twice_equals_adopting_once(seen: list[tuple[Bucket, Prediction, float]]):
    other = BucketedCalibration(LEVELS, model_version="1", origin="there", window=60, least=20)
    for each in seen:
        other.observe(*each)
    once, twice = a_calibration(), a_calibration()
    once.adopt(other.snapshot())
    for _ in range(2):
        twice.adopt(other.snapshot())
    bucket, prediction, _ = seen[0]

    assert (
        once.correct(prediction, [bucket]).quantiles_s.tolist()
        == twice.correct(prediction, [bucket]).quantiles_s.tolist()
    )


@settings(max_examples=50)
@given(st.lists(st.tuples(sound_times, sound_times), max_size=400))
def test_trust_returns_after_any_history(seen: list[tuple[float, float]]):
    monitor = CoverageMonitor()
    for predicted_s, actual_s in seen:
        monitor.observe(Bucket(0, 0, 0), predicted_s, actual_s)
    for _ in range(400):
        monitor.observe(Bucket(0, 0, 0), 1.0, 0.5)

    assert monitor.trusted
    assert monitor.residuals()[ALL].covered == 1.0
