"""How fast the policy takes the engine to be."""

import pytest

from shared.contracts.telemetry import Iteration
from solver.scheduling.latency import LatencyTable
from solver.scheduling.pace import EnginePace

SLOW = LatencyTable(tuple(0.01 * n for n in range(1001)))


def iteration(duration_s: float, tokens: int = 100) -> Iteration:
    return Iteration(compute_tokens=tokens, context_tokens=0, num_decodes=0, duration_s=duration_s)


def test_it_begins_as_the_latency_model_has_it() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)

    assert pace.iteration_s == pytest.approx(10)
    assert pace.token_s == pytest.approx(0.01)


def test_a_wrong_model_is_forgotten_within_a_few_iterations() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(20):
        pace.observe(iteration(0.1))

    assert pace.token_s == pytest.approx(0.001, rel=0.5)
    assert pace.iteration_s == pytest.approx(0.1 + 9.9 / 21, abs=0.01)


def test_later_one_iteration_in_twenty_counts() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(500):
        pace.observe(iteration(0.1))
    pace.observe(iteration(0.3))

    assert pace.iteration_s == pytest.approx(0.11)


def test_a_host_that_stood_still_is_not_slow_afterwards() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(500):
        pace.observe(iteration(0.1))
    pace.observe(iteration(60.0))

    # As if it had taken ten times what the model says: 1 s for these tokens.
    assert pace.iteration_s == pytest.approx(0.1 + 0.05 * 9.9)
    assert pace.token_s == pytest.approx(0.001 + 0.05 * 0.099)


def test_a_larger_iteration_than_usual_counts_in_full() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    for _ in range(500):
        pace.observe(iteration(0.08, tokens=8))
    pace.observe(iteration(10.0, tokens=1000))

    assert pace.iteration_s == pytest.approx(0.08 + 0.05 * 9.92)


def test_iterations_without_prefill_say_nothing_of_prefill_tokens() -> None:
    pace = EnginePace(SLOW, chunk_tokens=1000)
    pace.observe(iteration(0.02, tokens=8))
    pace.observe(iteration(0.0))

    assert pace.token_s == pytest.approx(0.01)
