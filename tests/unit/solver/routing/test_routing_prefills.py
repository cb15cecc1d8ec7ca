"""Trees with calibration and monitor, as used by a router."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.contracts.qos import Slo
from solver.prediction.calibration.coverage import CoverageMonitor
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_trees import Prediction, QuantileTrees
from solver.routing.admission_queue import Assignment
from solver.routing.prefills import MOST_S, CalibratedPrefills
from solver.routing.request import Candidate, RoutedRequest
from tests.prefill_times import NOMINAL, Request, matrix_of, requests_of, times_of

LEVELS = (0.9, 0.95)
LATER = requests_of(NOMINAL, 400, seed=2)


@pytest.fixture(scope="module")
def trees() -> QuantileTrees:
    trained = requests_of(NOMINAL, 2000, seed=1)
    return fit_quantile_trees(matrix_of(trained), times_of(trained), levels=LEVELS)


def prefills(trees: QuantileTrees) -> CalibratedPrefills:
    calibration = BucketedCalibration(LEVELS, model_version="1", origin="r")
    return CalibratedPrefills(trees, level=0.95, calibration=calibration, monitor=CoverageMonitor())


def asked(each: Request) -> tuple[RoutedRequest, Candidate]:
    request, instance = each.request, each.instance
    routed = RoutedRequest(
        request_id=RequestId("1"),
        tenant=TenantId("a"),
        arrived_at=0.0,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        slo=Slo(ttft_s=2.0),
    )
    candidate = Candidate(
        instance_id=InstanceId("w"),
        cached_tokens=instance.cached_tokens,
        running=instance.running,
        prefill_backlog_tokens=instance.prefill_backlog_tokens,
        kv_utilization=instance.kv_utilization,
    )
    return routed, candidate


def observed(reported: CalibratedPrefills, *, factor: float) -> None:
    """Observe requests like those of the training data that take *factor* times as long."""
    for each in LATER:
        request, candidate = asked(each)
        (estimate,) = reported.predict(request, [candidate])
        assignment = Assignment(request=request, candidate=candidate, estimate=estimate, key=0)
        reported.observe(assignment, factor * each.prefill_s)


def test_quantiles_exceed_means_and_candidates_are_independent(trees: QuantileTrees):
    reported = prefills(trees)
    request, candidate = asked(LATER[0])
    (alone,) = reported.predict(request, [candidate])

    assert alone.quantile_s > alone.mean_s > 0
    assert reported.predict(request, [candidate, candidate]) == [alone, alone]


def test_observations_correct_predictions_but_not_the_trees(trees: QuantileTrees):
    reported = prefills(trees)
    request, candidate = asked(LATER[0])
    (before,) = reported.predict(request, [candidate])
    observed(reported, factor=3.0)
    (after,) = reported.predict(request, [candidate])
    raw = reported.raw(request, [candidate])

    assert after.mean_s == pytest.approx(3 * before.mean_s, rel=0.5)
    assert after.quantile_s > 2 * before.quantile_s
    assert raw.mean_s[0] == pytest.approx(before.mean_s)


def test_predictions_are_not_trusted_while_prefills_take_far_longer(trees: QuantileTrees):
    reported = CalibratedPrefills(trees, level=0.95, monitor=CoverageMonitor())
    assert reported.is_trusted
    observed(reported, factor=3.0)

    assert not reported.is_trusted


def test_without_a_monitor_predictions_are_always_trusted(trees: QuantileTrees):
    reported = CalibratedPrefills(trees, level=0.9)
    observed(reported, factor=3.0)

    assert reported.is_trusted


def test_an_unfitted_level_is_rejected(trees: QuantileTrees):
    with pytest.raises(ValueError, match=r"no trees for level 0\.5"):
        CalibratedPrefills(trees, level=0.5)


@pytest.mark.parametrize("time_s", [math.inf, math.nan, -1.0, 1e300])
def test_invalid_estimates_become_the_upper_bound(time_s: float):
    class Absurd:
        levels = LEVELS

        def predict(self, features: NDArray[np.float64]) -> Prediction:
            return Prediction(np.full((len(features), 2), time_s), np.full(len(features), time_s))

        def column_of(self, level: float) -> int:
            return LEVELS.index(level)

    request, candidate = asked(LATER[0])
    (estimate,) = CalibratedPrefills(Absurd(), level=0.95).predict(request, [candidate])

    assert (estimate.mean_s, estimate.quantile_s, estimate.watched_s) == (MOST_S,) * 3
