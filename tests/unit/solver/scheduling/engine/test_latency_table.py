"""The scheduler's latency table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.latency_model import predict_s
from solver.scheduling.engine.latency import LatencyTable

POINTS = {1: 0.010, 8: 0.011, 16: 0.010, 48: 0.030}


def test_close_points_give_steps_and_distant_ones_ramps() -> None:
    table = LatencyTable.from_points(POINTS, max_tokens=96, overhead_s=0.5)

    assert table.tokens_s[2] == pytest.approx(0.511)
    assert table.tokens_s[32] == pytest.approx(0.5 + (0.010 + 0.030) / 2)
    assert table.tokens_s[96] == pytest.approx(0.560)


def test_a_table_never_falls_even_where_measurements_do() -> None:
    table = LatencyTable.from_points(POINTS, max_tokens=96)

    assert list(table.tokens_s) == sorted(table.tokens_s)
    assert table.tokens_s[16] == 0.011


@given(tokens=st.integers(1, 500), before=st.integers(0, 5000))
def test_the_table_of_a_model_predicts_one_prefill_like_the_model(tokens: int, before: int) -> None:
    fitted = LatencyCoefficients(
        constant_s=0.004, linear_s=5e-5, attention_s=2e-8, cross_s=3e-8, context_s=1e-7
    )
    table = LatencyTable.from_coefficients(fitted, max_tokens=512)

    assert table.predict_s(tokens, tokens * (before + tokens / 2), before) == pytest.approx(
        predict_s(fitted, compute_tokens=tokens, context_tokens=before)
    )


def test_time_beyond_the_table_grows_in_proportion() -> None:
    table = LatencyTable((0.0, 0.01, 0.02))

    assert table.predict_s(4, 0, 0) == pytest.approx(0.04)
