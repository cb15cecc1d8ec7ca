"""Layer-wise preemption in the simulator: worked examples."""

from math import inf

import pytest

from ops.baselines.scheduling.co_serving import SarathiPreemptive
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.offline import TimedRequest
from ops.sim.request import Arrival, SimRequest
from ops.sim.safepoints import SAFEPOINT_S, SAFEPOINTS, LayerwiseReplica
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.latency import LatencyTable

LATENCY = LatencyTable(tuple(0.001 * n for n in range(101)))
"""A token takes 1 ms; iterations of 80 tokens have a safepoint every 10 ms."""
CHECKS_S = SAFEPOINTS * SAFEPOINT_S
LIMITS = EngineLimits(max_budget_tokens=80, kv_capacity_tokens=4096)
CHAT = Slo(ttft_s=0.05, tbt_s=0.02)


def request(name: str, at: float, prompt: int, output: int, slo: Slo) -> TimedRequest:
    arrival = Arrival(
        arrived_at=at, prompt_tokens=prompt, output_tokens=output, class_name="*", slo=slo
    )
    return TimedRequest(RequestId(name), arrival)


def served(*requests: SimRequest, patience: float = 0.0) -> LayerwiseReplica:
    replica = LayerwiseReplica(SarathiPreemptive(80), LATENCY, LIMITS, patience=patience)
    replica.run(requests)
    return replica


def test_an_arrival_ends_offline_work_at_the_next_safepoint() -> None:
    """At an arrival at 25 ms, offline work stops at 30 ms; the online prompt takes 80 ms."""
    offline = request("offline", 0.0, 80, 1, Slo())
    chat = request("chat", 0.025, 80, 1, CHAT)
    replica = served(offline, chat)

    assert chat.first_token_at == pytest.approx(0.11, abs=1e-3)
    assert replica.num_cuts == 1
    assert replica.dropped_tokens == 80


def test_dropped_work_is_computed_again() -> None:
    """From 110 ms on, all 80 dropped tokens are computed again."""
    offline = request("offline", 0.0, 80, 1, Slo())
    served(offline, request("chat", 0.025, 80, 1, CHAT))

    assert offline.first_token_at == pytest.approx(0.19, abs=1e-3)
    assert offline.num_output_tokens == 1


def test_online_decodes_of_a_cut_iteration_get_their_token() -> None:
    """Three of eight parts compute 80 ms of offline work, five only the decode's 1 ms."""
    chat = request("chat", 0.0, 10, 3, CHAT)
    offline = request("offline", 0.001, 500, 1, Slo())
    late = request("late", 0.04, 5, 1, CHAT)
    served(chat, offline, late)

    assert chat.num_output_tokens == 3
    # From 10 ms on, an iteration has a decode and 79 prefill tokens; 40 ms is its third safepoint.
    assert chat.gaps_s[0] == pytest.approx(0.03 + 0.001 * 5 / 8, abs=1e-3)


def test_offline_work_is_not_cut_if_the_first_token_will_be_in_time() -> None:
    """55 ms are left and the prompt takes 80 ms: in time for 4 x 50 ms, late for 2 x 50 ms."""
    for patience, num_cuts in ((4.0, 0), (2.0, 1)):
        replica = served(
            request("offline", 0.0, 80, 1, Slo()),
            request("chat", 0.025, 80, 1, CHAT),
            patience=patience,
        )
        assert replica.num_cuts == num_cuts


def test_offline_arrivals_and_online_iterations_are_never_cut() -> None:
    replica = served(
        request("chat", 0.0, 80, 1, CHAT),
        request("chat too", 0.025, 80, 1, CHAT),
        request("offline", 0.03, 80, 1, Slo()),
        request("more", 0.2, 80, 1, Slo()),
    )

    assert replica.num_cuts == 0


def test_without_arrivals_only_the_checks_cost_time() -> None:
    layerwise = request("offline", 0.0, 400, 10, Slo())
    plain = request("offline", 0.0, 400, 10, Slo())
    served(layerwise, patience=inf)
    SimulatedReplica(SarathiPreemptive(80), LATENCY, LIMITS).run([plain])

    assert layerwise.finished_at is not None
    assert plain.finished_at is not None
    # 5 iterations of the prompt and 9 decodes
    assert layerwise.finished_at - plain.finished_at == pytest.approx(14 * CHECKS_S)
