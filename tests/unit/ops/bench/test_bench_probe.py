"""Probes end early only when nothing can change their result."""

from dataclasses import replace

import pytest

from ops.bench.qoserve_probe import probed_share, recorded
from ops.sim.engine import SimulatedReplica
from ops.sim.profiles import load
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario
from ops.sim.summary import violation_share
from ops.sim.workload import Q1

SHORT = Scenario(
    profile=load("28"), policy="sarathi-fcfs", duration_s=60.0, classes=(replace(Q1, share=1.0),)
)


@pytest.fixture
def num_iterations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with one entry: the number of iterations of all replicas since the call."""
    counted = [0]
    iterate = SimulatedReplica.iterate

    def counting(replica: SimulatedReplica, now: float) -> float:
        counted[0] += 1
        return iterate(replica, now)

    monkeypatch.setattr(SimulatedReplica, "iterate", counting)
    return counted


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("rate_rps", [3.0, 9.0, 30.0])
def test_a_probe_that_allows_all_misses_gives_the_exact_share(
    rate_rps: float, replicas: int
) -> None:
    scenario = replace(SHORT, rate_rps=rate_rps, replicas=replicas)

    assert probed_share(scenario, allowed=1.0) == violation_share(scenario.run().requests)


@pytest.mark.parametrize("allowed", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("rate_rps", [2.0, 4.0, 8.0, 16.0])
def test_the_probe_agrees_with_the_whole_simulation(rate_rps: float, allowed: float) -> None:
    scenario = replace(SHORT, rate_rps=rate_rps, replicas=2)
    whole = violation_share(scenario.run().requests)

    assert (probed_share(scenario, allowed=allowed) <= allowed) == (whole <= allowed)


def test_a_clearly_failing_simulation_ends_early(num_iterations: list[int]) -> None:
    scenario = replace(SHORT, rate_rps=30.0)
    probed_share(scenario, allowed=1.0)
    whole = num_iterations[0]
    probed_share(scenario, allowed=0.01)

    assert num_iterations[0] - whole < whole / 2


@pytest.mark.parametrize(
    "scenario",
    [
        replace(SHORT, pull=PullOptions()),
        replace(SHORT, silo=(("Q1", "edf", 2),)),
        replace(SHORT, drain=True),
    ],
)
def test_other_dispatch_than_round_robin_is_simulated_whole(scenario: Scenario) -> None:
    expected = violation_share(scenario.run().requests)

    assert probed_share(scenario, allowed=0.0) == expected


def test_recorded_iterations_add_up_to_the_work() -> None:
    scenario = replace(SHORT, rate_rps=1.0)
    steps = recorded(scenario)
    prompts = sum(arrival.prompt_tokens for arrival in scenario.workload())

    assert sum(step.prefill_tokens for step in steps) <= prompts
    assert sum(step.prefill_tokens for step in steps) > 0.9 * prompts
    assert all(step.tokens >= step.prefill_tokens and step.duration_s > 0 for step in steps)
