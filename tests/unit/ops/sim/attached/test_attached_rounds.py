"""A mesh in front of attached servers, and clients that choose the server, in virtual time."""

from statistics import mean

import pytest

from ops.bench.attach_rounds import OURS, Round
from ops.bench.attach_simulated import (
    DURATION_S,
    FRONTS,
    SEARCHED,
    SETUP,
    arrivals,
    round_of,
)
from ops.sim.attached.fronts import INTERACTIVE
from ops.sim.attached.rounds import Arrival, serve

RATE_RPS = 4.3


def rounds_of(name: str) -> list[Round]:
    loads = [arrivals(seed, RATE_RPS) for seed in range(6)]
    return [round_of(serve(FRONTS[name], load, DURATION_S, SETUP)) for load in loads]


def test_mesh_misses_fewer_targets_than_the_least_loaded_server_with_nearly_its_batch_work() -> (
    None
):
    ours, baseline = rounds_of(OURS), rounds_of(SEARCHED)
    assert 0.35 < mean(each.missed for each in baseline) < 0.6
    assert mean(each.missed for each in ours) < 0.6 * mean(each.missed for each in baseline)
    assert mean(each.batch_per_cpu_s for each in ours) > 0.93 * mean(
        each.batch_per_cpu_s for each in baseline
    )


@pytest.mark.parametrize("name", FRONTS)
def test_equal_loads_have_equal_outcomes(name: str) -> None:
    load = arrivals(0, RATE_RPS)[:20]
    first, second = (serve(FRONTS[name], load, 5.0, SETUP) for _ in range(2))
    assert [each.outcome for each in first.requests] == [each.outcome for each in second.requests]
    assert first.batch_tokens == second.batch_tokens


@pytest.mark.parametrize("name", FRONTS)
def test_every_request_is_answered_once_the_load_is_over(name: str) -> None:
    load = [Arrival(0.1 * number, INTERACTIVE, 50 * number + 1, 5) for number in range(30)]
    served = serve(FRONTS[name], load, 40.0, SETUP)
    assert [each.outcome.num_tokens for each in served.requests] == [5] * 30
