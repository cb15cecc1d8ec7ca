"""Trees, calibration and monitor together, on workloads that differ from the training data."""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest

from solver.prediction.calibration.buckets import bucket_of
from solver.prediction.calibration.coverage import CoverageMonitor, CoverageOptions
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_trees import QuantileTrees
from tests.prefill_times import (
    LARGE_BUDGET,
    LOW_REUSE,
    MORE_LONG,
    NOMINAL,
    Workload,
    matrix_of,
    requests_of,
    times_of,
)

COUNT = 3000
SEEDS = (7, 8)
WORKLOADS = pytest.mark.parametrize(
    "workload",
    [
        NOMINAL,
        pytest.param(MORE_LONG, marks=pytest.mark.slow),
        pytest.param(LOW_REUSE, marks=pytest.mark.slow),
        LARGE_BUDGET,
    ],
    ids=["nominal", "more long prompts", "low reuse", "large budgets"],
)


@dataclass(frozen=True, slots=True)
class Served:
    """Outcomes of the requests, in order."""

    raw: np.ndarray
    """bool[num_requests, num_levels]: True where the trees' quantile covered the request."""
    calibrated: np.ndarray
    means_s: np.ndarray
    """Corrected mean times."""
    actual_s: np.ndarray
    trusted: list[bool]


asked = cache(partial(requests_of, count=COUNT))
"""The requests of a workload and a seed, generated once for all tests."""


@cache
def trees() -> QuantileTrees:
    trained = requests_of(NOMINAL, 4000, seed=1)
    return fit_quantile_trees(matrix_of(trained), times_of(trained), levels=(0.9, 0.95))


@cache
def served(
    workload: Workload,
    *,
    slow_from: int = COUNT,
    slow_until: int = COUNT,
    seed: int = SEEDS[0],
) -> Served:
    """Serve requests one by one; between the bounds, every prefill takes twice as long."""
    requests = asked(workload, seed=seed)
    actual_s = times_of(requests)
    actual_s[slow_from:slow_until] *= 2
    raw = trees().predict(matrix_of(requests))
    calibration = BucketedCalibration(trees().levels, model_version="1", origin="here")
    monitor, column = CoverageMonitor(), trees().column_of(CoverageOptions().level)
    quantiles_s, means_s, trusted = [], [], []
    for place, each in enumerate(requests):
        bucket, own = bucket_of(each.request, each.instance), raw.of(place)
        corrected = calibration.correct(own, [bucket])
        quantiles_s.append(corrected.quantiles_s[0])
        means_s.append(corrected.mean_s[0])
        monitor.observe(bucket, float(corrected.quantiles_s[0, column]), float(actual_s[place]))
        calibration.observe(bucket, own, float(actual_s[place]))
        trusted.append(monitor.trusted)
    return Served(
        raw=actual_s[:, None] <= raw.quantiles_s,
        calibrated=actual_s[:, None] <= np.array(quantiles_s),
        means_s=np.array(means_s),
        actual_s=actual_s,
        trusted=trusted,
    )


@WORKLOADS
@pytest.mark.parametrize("slow_from", [COUNT, COUNT // 2], ids=["steady", "half as fast"])
def test_calibrated_coverage_of_the_last_thousand_is_within_two_points(
    workload: Workload, slow_from: int
):
    """The test uses the mean of two runs, because chance moves a run by one or two points."""
    runs = [served(workload, slow_from=slow_from, seed=seed) for seed in SEEDS]
    late = slice(-1000, None)
    coverage = np.mean([run.calibrated[late].mean(axis=0) for run in runs], axis=0)
    raw = np.mean([run.raw[late].mean(axis=0) for run in runs], axis=0)
    expected_s = sum(run.means_s[late].sum() for run in runs)

    assert coverage == pytest.approx([0.9, 0.95], abs=0.02)
    assert np.all(raw < (0.95 if slow_from == COUNT else 0.5))
    assert expected_s == pytest.approx(sum(run.actual_s[late].sum() for run in runs), rel=0.05)


@WORKLOADS
def test_correct_coverage_keeps_trust(workload: Workload):
    assert all(served(workload, slow_from=COUNT, seed=SEEDS[0]).trusted)


@WORKLOADS
def test_doubled_times_end_trust_until_they_are_over(workload: Workload):
    """Trust returns before the change ends, because calibration follows the change."""
    trusted = served(workload, slow_from=1000, slow_until=2000).trusted

    assert all(trusted[:1000])
    assert not all(trusted[1000:1200])
    assert all(trusted[2500:])
