"""The policy's estimate of the engine's speed."""

import pytest

from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.pace import EnginePace

SLOW = LatencyTable(tuple(0.01 * n for n in range(1001)))


def iteration(duration_s: float, tokens: int = 100) -> Iteration:
    return Iteration(compute_tokens=tokens, context_tokens=0, num_decodes=0, duration_s=duration_s)


def test_the_pace_begins_with_the_latency_model() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)

    assert pace.iteration_s == pytest.approx(10)
    assert pace.token_s == pytest.approx(0.01)


def test_a_wrong_model_is_forgotten_within_a_few_iterations() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(20):
        pace.observe(iteration(0.1))

    assert pace.token_s == pytest.approx(0.001, rel=0.5)
    assert pace.iteration_s == pytest.approx(0.1 + 9.9 / 21, abs=0.01)


def test_later_each_iteration_has_a_weight_of_one_twentieth() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(500):
        pace.observe(iteration(0.1))
    pace.observe(iteration(0.3))

    assert pace.iteration_s == pytest.approx(0.11)


def test_a_host_is_not_slow_after_a_stall() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(500):
        pace.observe(iteration(0.1))
    pace.observe(iteration(60.0))

    # The stall counts as ten times the predicted time: 1 s for the iteration's tokens.
    assert pace.iteration_s == pytest.approx(0.1 + 0.05 * 9.9)
    assert pace.token_s == pytest.approx(0.001 + 0.05 * 0.099)


def test_a_larger_iteration_than_usual_counts_in_full() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(500):
        pace.observe(iteration(0.08, tokens=8))
    pace.observe(iteration(10.0, tokens=1000))

    assert pace.iteration_s == pytest.approx(0.08 + 0.05 * 9.92)


def test_iterations_without_prefill_do_not_change_the_token_time() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    pace.observe(iteration(0.02, tokens=8))
    pace.observe(iteration(0.0))

    assert pace.token_s == pytest.approx(0.01)
