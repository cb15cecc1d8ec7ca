"""`ops.bench doors_simulated`: loads, rates and lines of the cells of `doors` in virtual time."""

from dataclasses import replace

import pytest

from ops.bench.doors_fronts import OURS
from ops.bench.doors_report import IN_TURN
from ops.bench.doors_simulated import SIMULATED, Search
from ops.bench.doors_simulated_report import Place, best_client, lines
from ops.bench.doors_simulated_rounds import ARMS, CLIENTS, Load, Round, serve

SECONDS, SEEDS = 12.0, (1, 2)


def load(cell: str, *, seed: int = 1, rate_rps: float = 11.0) -> Load:
    return Load(cell=SIMULATED[cell], rate_rps=rate_rps, seconds=SECONDS, seed=seed)


@pytest.mark.parametrize("arm", ARMS)
def test_equal_seeds_give_equal_figures(arm: str):
    first = serve(arm, replace(load("chat-batch-8"), seconds=4.0))
    assert first == serve(arm, replace(load("chat-batch-8"), seconds=4.0))
    assert first != serve(arm, replace(load("chat-batch-8", seed=2), seconds=4.0))


def test_headway_misses_fewer_targets_than_the_best_client_and_computes_nothing_twice():
    arms = {name: [serve(name, load("chat-batch-8", seed=seed)) for seed in SEEDS] for name in ARMS}
    ours, other = arms[OURS], arms[best_client(arms)]
    assert sum(each.missed for each in other) > 0.2
    assert sum(each.missed for each in ours) < 0.5 * sum(each.missed for each in other)
    assert [(each.lost, each.evicted) for each in ours] == [(0, 0)] * len(SEEDS)
    assert max(each.twice for each in ours) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("cell", SIMULATED)
def test_every_request_of_every_cell_is_answered(cell: str):
    few = replace(load(cell, rate_rps=SIMULATED[cell].rates["10%"]), seconds=3.0)
    for arm in (IN_TURN, OURS):
        served = serve(arm, few)
        assert served.lost == 0
        assert served.missed < 1.0


def test_the_rates_are_those_at_which_the_best_client_misses_the_shares():
    cell = SIMULATED["chat-batch-8"]
    search = Search(cell=cell, loads=("10%", "50%"), seeds=(1,), seconds=SECONDS)
    for place, share in zip(search.places(), (0.10, 0.50), strict=True):
        found = replace(load(cell.name), rate_rps=place.rate_rps)
        missed = min(serve(name, found).missed for name in CLIENTS)
        assert missed == pytest.approx(share, abs=0.05)


def made(missed: float, *, first_p50_s: float = 0.2, last_batch_s: float | None = 60.0) -> Round:
    return Round(
        classes={},
        missed=missed,
        first_p50_s=first_p50_s,
        last_batch_s=last_batch_s,
        lost=0,
        evicted=0,
        twice=0.0,
    )


def test_the_best_client_of_a_place_and_the_worst_cell_count():
    measured = {}
    for cell, ours in (("a", 0.10), ("b", 0.20)):
        arms = {name: [made(0.5)] for name in CLIENTS}
        arms["least loaded"] = [made(0.4, last_batch_s=50.0)]
        arms[OURS] = [made(ours, first_p50_s=0.3)]
        measured[Place(cell=cell, load="30%", rate_rps=1.0)] = arms
    values = {line.name: line.value for line in lines(measured)}
    assert values["misses, headway / best client, where the best client misses 30%"] == (
        pytest.approx(0.5)
    )
    assert values[
        "time of the last batch answer, headway / best client, where the best client misses 30%"
    ] == pytest.approx(1.2)
    assert values["misses, headway / best client, where the best client misses 50%"] is None


def test_of_clients_with_equal_misses_the_one_with_the_earliest_first_tokens_is_the_best():
    arms = {name: [made(0.1)] for name in CLIENTS} | {OURS: [made(0.0)]}
    arms["least loaded"] = [made(0.1, first_p50_s=0.1)]
    assert best_client(arms) == "least loaded"
