"""Throughput of an instance with a full batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.full_batch import LARGEST_ITERATION_TOKENS, batch_size, full_batch

LATENCY = LatencyCoefficients(constant_s=0.01, linear_s=0.001)


def test_ten_decodes_run_beside_the_next_prompts():
    """10 decodes and 30 prompt tokens take 50 ms, for prompts and answers alike."""
    full = full_batch(LATENCY, batch=10, prompt=192.0, output=64.0)

    assert full.token_rate_per_s == pytest.approx(40 / 0.05)
    assert full.decode_s_per_token == pytest.approx(0.05)


def test_an_iteration_respects_its_token_limit():
    """Requests of 1000 prompt tokens and one answer token: 8 would need 8008 tokens/iteration."""
    full = full_batch(LATENCY, batch=8, prompt=1000.0, output=1.0)

    tokens = LARGEST_ITERATION_TOKENS
    assert full.token_rate_per_s == pytest.approx(tokens / (0.01 + 0.001 * tokens))


def test_iterations_without_duration_have_no_rate():
    full = full_batch(
        LatencyCoefficients(constant_s=0.0, linear_s=0.0), batch=8, prompt=10.0, output=10.0
    )

    assert full == (None, 0.0)


@pytest.mark.parametrize(
    ("max_running", "capacity", "fit"), [(8, 10_000, 8.0), (64, 1000, 10.0), (8, 50, 1.0)]
)
def test_batch_size_is_limited_by_slots_or_by_kv_cache(max_running: int, capacity: int, fit: float):
    assert batch_size(max_running, capacity, 100.0) == fit


@given(st.floats(1, 256), st.floats(1, 256))
def test_a_larger_batch_is_never_slower(batch: float, more: float):
    one, other = (
        full_batch(LATENCY, batch=each, prompt=100.0, output=50.0).token_rate_per_s
        for each in (batch, batch + more)
    )

    assert one is not None
    assert other is not None
    assert other >= one * (1 - 1e-9)
