"""Conformal corrections of one regime: ranks, means, and forgetting."""

import math

import pytest

from shared.contracts.routing import Residual
from solver.prediction.calibration.residuals import Residuals


def residual(score: float, *, mean_s: float = 1.0, actual_s: float = 1.0) -> Residual:
    return Residual(
        number=1, bucket=(0, 0, 0), pace=0.0, scores=(score,), mean_s=mean_s, actual_s=actual_s
    )


@pytest.mark.parametrize(
    ("count", "level", "rank"),
    [
        (19, 0.95, 19),  # rank ceil(20 * 0.95) = 19: the largest score, which covers 19 of 20
        (39, 0.95, 38),
        (99, 0.9, 90),
        (100, 0.9, 91),
        # Rank ceil(10 * 0.95) = 10 exceeds the number of scores: the largest score is used.
        (9, 0.95, 9),
    ],
)
def test_the_rank_allows_for_the_next_request(count: int, level: float, rank: int):
    """The correction is the ceil((n + 1) * level)-th smallest score (Romano 2019, eq. 10)."""
    residuals = Residuals((level,))
    for place in reversed(range(1, count + 1)):
        residuals.add(residual(math.log(place)))

    assert residuals.factors()[0] == pytest.approx(rank)


def test_means_are_corrected_by_totals():
    residuals = Residuals((0.9,))
    residuals.add(residual(0.0, mean_s=1.0, actual_s=1.0))
    residuals.add(residual(0.0, mean_s=3.0, actual_s=9.0))

    assert residuals.factors()[-1] == pytest.approx(10 / 4)


def test_a_removed_residual_has_no_effect():
    residuals = Residuals((0.5,))
    kept, gone = residual(0.25, actual_s=2.0), residual(-3.0, actual_s=1e6)
    residuals.add(kept)
    before = residuals.factors()
    residuals.add(gone)
    residuals.remove(gone)

    assert residuals.count == 1
    assert residuals.factors() == pytest.approx(before)


def test_removing_the_last_residual_removes_rounding_errors():
    residuals = Residuals((0.5,))
    for actual_s in (0.1, 0.2, 0.3):
        residuals.add(residual(0.0, actual_s=actual_s))
    for actual_s in (0.1, 0.2, 0.3):
        residuals.remove(residual(0.0, actual_s=actual_s))
    residuals.add(residual(0.0, actual_s=1e-6))

    assert residuals.factors()[-1] == pytest.approx(1e-6, rel=1e-12)
