"""Incremental checkpoints in the simulator: worked examples."""

from math import inf

import pytest

from ops.baselines.scheduling.co_serving import SarathiPreemptive
from ops.sim.checkpoints import CheckpointingReplica
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.latency import LatencyTable

LATENCY = LatencyTable(tuple(0.001 * n for n in range(101)))
"""A token takes 1 ms."""
LIMITS = EngineLimits(max_budget_tokens=80, kv_capacity_tokens=320)
CHAT = Slo(ttft_s=1, tbt_s=0.02)


def request(name: str, at: float, prompt: int, output: int, slo: Slo) -> SimRequest:
    arrival = Arrival(
        arrived_at=at, prompt_tokens=prompt, output_tokens=output, class_name="*", slo=slo
    )
    return SimRequest(RequestId(name), arrival)


def served(link_tokens_per_s: float) -> tuple[CheckpointingReplica, SimRequest]:
    """
    Serve an offline prompt of 240 tokens and, from 150 ms on, an online prompt of 160 tokens.

    KV has room for 320 tokens, so the offline request, with 160 computed tokens, loses its KV.
    """
    offline = request("offline", 0.0, 240, 2, Slo())
    replica = CheckpointingReplica(
        SarathiPreemptive(80),
        LATENCY,
        LIMITS,
        patience=inf,
        link_tokens_per_s=link_tokens_per_s,
    )
    replica.run([offline, request("chat", 0.15, 160, 1, CHAT)])
    return replica, offline


def test_a_preempted_request_resumes_from_its_copy() -> None:
    """The first iteration's 80 tokens are copied; the last iteration's tokens are lost."""
    replica, offline = served(1e9)

    assert offline.num_preempted == 1
    assert replica.restored_tokens == 80
    assert replica.totals.wasted_tokens == 80
    assert replica.totals.tokens == 241 + 160 + 80


def test_copies_save_recomputing() -> None:
    offline = request("offline", 0.0, 240, 2, Slo())
    replica = SimulatedReplica(SarathiPreemptive(80), LATENCY, LIMITS)
    replica.run([offline, request("chat", 0.15, 160, 1, CHAT)])

    assert replica.totals.wasted_tokens == 160
    assert replica.totals.tokens == 241 + 160 + 160


def test_a_slow_link_copies_less() -> None:
    """A link of 0.5 tokens per ms copies 40 tokens during the second iteration of 80 ms."""
    replica, _ = served(501.0)

    assert replica.restored_tokens == 40
    assert replica.totals.wasted_tokens == 120


def test_a_request_waits_until_its_copy_is_back() -> None:
    """Restoring 80 tokens at 1 token per ms takes 80 ms, in which the engine is idle."""
    fast, slow = served(1e9)[1], served(1001.0)[1]

    assert fast.finished_at is not None
    assert slow.finished_at is not None
    assert slow.finished_at - fast.finished_at == pytest.approx(0.08, abs=1e-3)


def test_online_requests_are_not_copied() -> None:
    replica, _ = served(1e9)

    assert replica._saved == {}
    assert replica._loaded_at == {}
