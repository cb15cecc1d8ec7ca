"""Check of prefill-time samples before they are used for training."""

import math

import pytest

from solver.prediction.prefill import samples as prefill_samples
from solver.prediction.prefill.features import FEATURES
from solver.prediction.prefill.samples import TIME, fault_of
from tests.prefill_times import LARGE_BUDGET, MORE_LONG, requests_of
from tests.sampled import plain, sample_of


def fault(prefill_s: float = 0.1, **features: float) -> str | None:
    sample = plain(prefill_s, **features)
    return fault_of(sample.features, sample.prefill_s)


def test_plausible_samples_are_accepted():
    samples = [
        sample_of(each)
        for mix in (MORE_LONG, LARGE_BUDGET)
        for each in requests_of(mix, 50, seed=1)
    ]

    assert {fault_of(each.features, each.prefill_s) for each in samples} == {None}


def test_every_feature_has_bounds():
    assert tuple(prefill_samples._BOUNDS) == FEATURES


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e12])
def test_an_impossible_feature_is_named(name: str, value: float):
    assert fault(**{name: value}) == name


@pytest.mark.parametrize("prefill_s", [math.nan, math.inf, -0.1, 0.0, 3601.0])
def test_an_impossible_time_is_named(prefill_s: float):
    assert fault(prefill_s) == TIME


def test_the_first_fault_is_named():
    assert fault(-1.0, top_p=2.0, running=math.nan) == "top_p"


@pytest.mark.parametrize("features", [(), (0.0,) * (len(FEATURES) + 1)])
def test_a_wrong_number_of_features_is_named(features: tuple[float, ...]):
    assert fault_of(features, 0.1) == "features"
