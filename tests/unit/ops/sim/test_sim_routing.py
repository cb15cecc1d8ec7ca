"""Simulated instances behind a router: traffic, prefix caches, engines, figures."""

from dataclasses import replace

import numpy as np
import pytest

from ops.sim.profiles import load
from ops.sim.request import Arrival
from ops.sim.routing.cluster import RoutingCluster, RoutingOutcome, simulate_routing
from ops.sim.routing.engine import Slowdown
from ops.sim.routing.predictors import OraclePrefills
from ops.sim.routing.prefix_cache import PrefixCache
from ops.sim.routing.summary import jain, max_min_shares, summarize_routing
from ops.sim.routing.workload import INTERACTIVE, LONG, MIXES, RoutedArrival, RoutedTraffic
from shared.contracts.base import TenantId
from solver.routing.options import VARIANTS

LATENCY = load("28").latency
SCALE = 2.0


def traffic(mix: str = "mixed", *, rate_rps: float = 5.0, count: int = 60) -> list[RoutedArrival]:
    return RoutedTraffic(mix=MIXES[mix], rate_rps=rate_rps, num_requests=count, seed=3).arrivals()


def served(arrivals: list[RoutedArrival], variant: str = "default") -> RoutingOutcome:
    cluster = RoutingCluster(latency=LATENCY, scale=SCALE)
    return simulate_routing(arrivals, cluster, VARIANTS[variant], OraclePrefills(LATENCY, SCALE))


def asked(key: str, prompt: int, *prefixes: tuple[str, int], at: float = 0.0) -> RoutedArrival:
    return RoutedArrival(
        arrival=Arrival(
            arrived_at=at, prompt_tokens=prompt, output_tokens=2, class_name="chat", slo=INTERACTIVE
        ),
        tenant=TenantId("a"),
        max_tokens=10,
        prefixes=prefixes,
        stores=key,
    )


@pytest.mark.parametrize("mix", MIXES)
def test_traffic_is_in_order_and_equal_for_equal_seeds(mix: str):
    arrivals = traffic(mix)
    times = [each.arrival.arrived_at for each in arrivals]

    assert arrivals == traffic(mix)
    assert times == sorted(times)
    assert all(each.arrival.output_tokens <= each.max_tokens for each in arrivals)
    assert {each.arrival.slo for each in arrivals} <= {INTERACTIVE, LONG}


@pytest.mark.slow
def test_bursts_do_not_change_the_mean_rate():
    arrivals = traffic("bursty", rate_rps=20.0, count=6000)

    assert 6000 / arrivals[-1].arrival.arrived_at == pytest.approx(20.0, rel=0.06)


def test_a_prefix_matches_in_whole_blocks_and_never_all_of_the_prompt():
    cache = PrefixCache()
    cache.store(asked("talk", 100), 100)

    assert cache.match_tokens(asked("talk", 300, ("talk", 100))) == 96
    assert cache.match_tokens(asked("talk", 100, ("talk", 100))) == 96
    assert cache.match_tokens(asked("talk", 96, ("talk", 96))) == 80
    assert cache.match_tokens(asked("other", 300, ("other", 100))) == 0


def test_the_least_recently_used_prefix_leaves_the_cache_first():
    cache = PrefixCache()
    for key in ("one", "two", "three"):
        cache.store(asked(key, 100), 100)
    cache.use(asked("one", 200, ("one", 100)))
    cache.shrink(250)

    assert cache.match_tokens(asked("x", 200, ("two", 100))) == 0
    assert cache.match_tokens(asked("x", 200, ("one", 100))) == 96


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_request_is_answered_under_every_policy(variant: str):
    outcome = served(traffic(), variant)

    assert all(
        each.num_output_tokens == each.output_tokens and each.scheduled_at is not None
        for each in outcome.requests
    )
    assert len(outcome.fallen_back) == len(outcome.requests)


def test_simulations_are_deterministic():
    first, second = (summarize_routing(served(traffic())) for _ in range(2))

    assert first == second


def test_cached_tokens_are_not_computed_again():
    """A conversation's second turn runs 30 s later on the instance of the first turn."""
    first = asked("talk", 6000)
    second = asked("talk", 6100, ("talk", 6000), at=30.0)
    outcome = served([first, second])
    times = [
        each.first_token_at - each.scheduled_at
        for each in outcome.requests
        if each.first_token_at is not None and each.scheduled_at is not None
    ]

    assert outcome.requests[1].cached_tokens == 6000
    assert times[1] < 0.2 * times[0]


def test_a_slowdown_applies_during_its_time():
    cluster = RoutingCluster(latency=LATENCY, scale=SCALE)
    slow = replace(cluster, slowdown=Slowdown(factor=2.0, begins_at=0.0, ends_at=1e9))
    oracle = OraclePrefills(LATENCY, SCALE)
    one, other = (
        simulate_routing([asked("talk", 6000)], each, VARIANTS["default"], oracle)
        for each in (cluster, slow)
    )

    assert other.end_s == pytest.approx(2 * one.end_s)


def test_jains_index_is_1_for_equal_values_and_1_over_n_for_a_single_value():
    assert jain([3, 3, 3]) == pytest.approx(1.0)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)


def test_shares_are_max_min_fair():
    """A tenant gets the 2 of 12 that it requests; other tenants share 10."""
    asked_for = {TenantId("a"): 2.0, TenantId("b"): 8.0, TenantId("c"): 50.0}

    assert list(max_min_shares(asked_for, 12.0).values()) == pytest.approx([2, 5, 5])


def test_the_oracle_knows_the_time_alone_on_an_idle_engine():
    outcome = served([asked("talk", 6000)])
    request = outcome.requests[0]
    assert request.first_token_at is not None
    estimate = outcome.assignments[request.request_id].estimate

    assert estimate.mean_s == pytest.approx(request.first_token_at, rel=0.25)
    assert np.isfinite(estimate.quantile_s)
