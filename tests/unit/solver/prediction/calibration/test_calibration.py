"""Bucketed corrections: relevant residuals, forgetting, and sharing between routers."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.routing import CalibrationSnapshot
from solver.prediction.calibration.buckets import Bucket
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.quantile_trees import Prediction

LEVELS = (0.5, 0.9)
SHORT, LONG = Bucket(0, 0, 0), Bucket(3, 0, 0)
ONE_S = Prediction(np.array([[1.0, 2.0]]), np.array([1.0]))


def a_calibration(origin: str = "router-1", *, window: int = 100) -> BucketedCalibration:
    return BucketedCalibration(
        LEVELS, model_version="trees-1", origin=origin, window=window, least=10
    )


def observe(
    calibration: BucketedCalibration, bucket: Bucket, actual_s: float, *, times: int = 1
) -> None:
    for _ in range(times):
        calibration.observe(bucket, ONE_S, actual_s)


def at_pace(origin: str = "router-1", *, window: int = 100) -> BucketedCalibration:
    """A calibration after 16 requests that took the predicted time, so that its pace is known."""
    calibration = a_calibration(origin, window=window)
    observe(calibration, SHORT, 1.0, times=16)
    return calibration


def corrected(calibration: BucketedCalibration, bucket: Bucket) -> list[float]:
    """Corrected median, 0.9 quantile and mean, for predictions of 1, 2 and 1 s."""
    prediction = calibration.correct(ONE_S, [bucket])
    return [*prediction.quantiles_s[0].tolist(), *prediction.mean_s.tolist()]


def test_without_candidates_predictions_are_empty():
    absent = Prediction(np.empty((0, 2)), np.empty(0))

    assert a_calibration().correct(absent, []).quantiles_s.shape == (0, 2)


def test_without_observations_no_prediction_is_corrected():
    assert corrected(a_calibration(), SHORT) == [1.0, 2.0, 1.0]


def test_few_observations_cause_no_correction():
    calibration = at_pace()
    observe(calibration, SHORT, 4.0, times=9)

    assert corrected(calibration, SHORT) == [1.0, 2.0, 1.0]


def test_enough_observations_correct_quantiles_and_mean():
    calibration = a_calibration()
    observe(calibration, SHORT, 4.0, times=26)

    assert corrected(calibration, SHORT) == pytest.approx([4.0, 4.0, 4.0])


def test_each_candidate_is_corrected_by_its_bucket():
    calibration = at_pace()
    for _ in range(10):  # Slow and fast requests alternate, so that the pace does not change.
        observe(calibration, SHORT, 4.0)
        observe(calibration, LONG, 0.5)
        observe(calibration, LONG, 1.0)
    pair = Prediction(np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([1.0, 1.0]))
    prediction = calibration.correct(pair, [SHORT, LONG])

    assert prediction.quantiles_s == pytest.approx(np.array([[4.0, 4.0], [1.0, 1.0]]))
    assert prediction.mean_s == pytest.approx(np.array([4.0, 0.75]))


@pytest.mark.parametrize(
    ("seen", "asked"),
    [
        (Bucket(1, 2, 0), Bucket(1, 2, 1)),
        (Bucket(1, 2, 0), Bucket(1, 0, 1)),
        (Bucket(1, 2, 0), Bucket(2, 0, 1)),
    ],
    ids=["another load", "another locality", "another prompt size"],
)
def test_a_bucket_with_few_requests_falls_back_to_coarser_ones(seen: Bucket, asked: Bucket):
    calibration = at_pace()
    observe(calibration, seen, 4.0, times=10)
    observe(calibration, asked, 1.0, times=1)

    assert corrected(calibration, asked)[0] == pytest.approx(4.0)


def test_the_finest_bucket_with_enough_requests_is_used():
    calibration = a_calibration()
    observe(calibration, Bucket(1, 2, 0), 8.0, times=50)
    observe(calibration, Bucket(1, 0, 0), 4.0, times=10)

    assert corrected(calibration, Bucket(1, 0, 2))[0] == pytest.approx(4.0)


def test_changes_are_forgotten_after_a_window_over_all_buckets():
    calibration = a_calibration(window=20)
    observe(calibration, SHORT, 8.0, times=20)
    observe(calibration, LONG, 1.0, times=20)

    assert corrected(calibration, SHORT)[0] == pytest.approx(1.0)


def test_quantiles_stay_in_order():
    calibration = at_pace()
    observe(calibration, SHORT, 4.0, times=10)
    crossing = Prediction(np.array([[2.0, 1.0]]), np.array([1.0]))

    assert np.all(np.diff(calibration.correct(crossing, [SHORT]).quantiles_s) >= 0)


@pytest.mark.parametrize("actual_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(actual_s: float):
    calibration = a_calibration()
    observe(calibration, SHORT, actual_s, times=20)

    assert calibration.snapshot().residuals == ()
    assert corrected(calibration, SHORT) == [1.0, 2.0, 1.0]


def test_a_common_trend_is_followed_within_a_hundred_requests():
    """The trend applies to all buckets, here to a bucket without requests since the change."""
    calibration = a_calibration(window=400)
    observe(calibration, LONG, 1.0, times=100)
    observe(calibration, SHORT, 1.0, times=100)
    observe(calibration, SHORT, 2.0, times=70)

    assert corrected(calibration, LONG) == pytest.approx([2.0, 2.0, 2.0], rel=0.01)


class TestSharing:
    def test_residuals_of_other_routers_count(self):
        one, other = a_calibration("router-1"), at_pace("router-2")
        observe(other, SHORT, 4.0, times=10)
        one.adopt(other.snapshot())

        assert corrected(one, SHORT) == corrected(other, SHORT)

    def test_a_snapshot_counts_once_and_older_snapshots_are_ignored(self):
        one, other = a_calibration("router-1"), at_pace("router-2")
        observe(other, SHORT, 4.0, times=10)
        older = other.snapshot()
        observe(other, SHORT, 2.0, times=15)
        for snapshot in (other.snapshot(), other.snapshot(), older):
            one.adopt(snapshot)

        assert corrected(one, SHORT) == corrected(other, SHORT)

    def test_a_router_ignores_its_own_snapshot(self):
        calibration = at_pace()
        observe(calibration, SHORT, 4.0, times=10)
        calibration.adopt(calibration.snapshot())

        assert len(calibration.snapshot().residuals) == 10

    def test_adopted_residuals_are_not_passed_on(self):
        one, other = a_calibration("router-1"), at_pace("router-2")
        observe(other, SHORT, 4.0, times=10)
        one.adopt(other.snapshot())

        assert one.snapshot().residuals == ()

    def test_a_restarted_router_learns_from_the_others(self):
        old = at_pace("router-1, first run")
        observe(old, SHORT, 4.0, times=10)
        body = msgspec.json.encode(old.snapshot())
        new = a_calibration("router-1, second run")
        new.adopt(msgspec.json.decode(body, type=CalibrationSnapshot))

        assert corrected(new, SHORT) == corrected(old, SHORT)

    def test_a_restarted_router_uses_the_others_pace_until_it_has_its_own(self):
        one, other = a_calibration("router-1"), at_pace("router-2")
        observe(other, SHORT, 1.0, times=50)
        observe(other, SHORT, 4.0, times=70)
        one.adopt(other.snapshot())
        assert corrected(one, SHORT) == corrected(other, SHORT)
        observe(one, SHORT, 1.0, times=50)

        assert corrected(one, SHORT)[0] < corrected(other, SHORT)[0] / 3

    @pytest.mark.parametrize(
        "changes",
        [
            {"scores": (0.0,)},
            {"scores": (0.0, 800.0)},
            {"pace": math.nan},
            {"mean_s": 0.0},
            {"actual_s": -1.0},
        ],
        ids=["too few scores", "too large a score", "no pace", "no mean", "negative time"],
    )
    def test_invalid_residuals_are_rejected_as_a_whole(self, changes: dict[str, Any]):
        one, other = a_calibration("router-1"), at_pace("router-2")
        observe(other, SHORT, 4.0, times=10)
        snapshot = other.snapshot()
        broken = msgspec.structs.replace(snapshot.residuals[-1], number=11, **changes)
        with pytest.raises(ContractError, match="a residual of router-2 is invalid"):
            one.adopt(msgspec.structs.replace(snapshot, residuals=(*snapshot.residuals, broken)))

        assert corrected(one, SHORT) == [1.0, 2.0, 1.0]

    @pytest.mark.parametrize(
        ("field", "value"),
        [("snapshot_version", 9), ("model_version", "trees-2"), ("levels", (0.5,))],
    )
    def test_residuals_of_other_trees_are_rejected(self, field: str, value: object):
        snapshot = msgspec.structs.replace(a_calibration("router-2").snapshot(), **{field: value})
        with pytest.raises(SchemaMismatchError, match=f"{field} is ") as refused:
            a_calibration().adopt(snapshot)

        assert refused.value.field == field
