"""Prefill times without trees: one iteration of what is not cached."""

import numpy as np
import pytest

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency_prefills import LatencyPrefills
from solver.prediction.prefill_features import InstanceFeatures, RequestFeatures, feature_matrix

LATENCY = LatencyCoefficients(constant_s=0.01, linear_s=1e-3, cross_s=1e-6, context_s=1e-5)


def predicted_s(prompt: int, cached: int = 0, running: int = 0) -> float:
    matrix = feature_matrix(
        RequestFeatures(prompt_tokens=prompt, max_tokens=10),
        [InstanceFeatures(cached_tokens=cached, running=running)],
    )
    return float(LatencyPrefills(LATENCY, (0.5, 0.9)).predict(matrix).mean_s[0])


def test_the_latency_model_by_hand():
    # 600 tokens over 400 cached, beside 10 sequences: 0.01 + 0.61 + 0.244 + 0.004
    assert predicted_s(1000, cached=400, running=10) == pytest.approx(0.868)


def test_what_is_cached_saves_time_and_company_costs_some():
    assert predicted_s(1000, cached=900) < predicted_s(1000) < predicted_s(1000, running=5)


def test_all_levels_are_the_mean_until_they_are_corrected():
    matrix = feature_matrix(
        RequestFeatures(prompt_tokens=50, max_tokens=10), [InstanceFeatures()] * 3
    )
    prediction = LatencyPrefills(LATENCY, (0.5, 0.9)).predict(matrix)

    assert prediction.quantiles_s.shape == (3, 2)
    assert np.all(prediction.quantiles_s == prediction.mean_s[:, None])


def test_a_level_that_is_not_told_is_named():
    with pytest.raises(ValueError, match=r"0\.7"):
        LatencyPrefills(LATENCY, (0.5, 0.9)).column_of(0.7)
