"""Best-effort work when no other work needs its resources."""

from dataclasses import replace

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.admission import PlannedBatch
from solver.scheduling.engine.chunking import chunk_tokens
from solver.scheduling.engine.decision import BatchState, IterationOutcome, RequestView, RunningView
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import DEFAULT
from solver.scheduling.engine.qoserve import QoServePolicy
from tests.unit.solver.scheduling.running import Running

LATENCY = LatencyTable(tuple(1e-4 * n for n in range(8193)), context_s=1e-6)
OPTIONS = replace(DEFAULT, aging_bound_s=100.0)
CHAT, DUMP = Slo(ttft_s=1, tbt_s=0.1), Slo()


def add(policy: QoServePolicy, name: str, slo: Slo, prompt: int, arrived_at: float = 0.0) -> None:
    policy.add(
        RequestView(
            request_id=RequestId(name),
            arrived_at=arrived_at,
            prompt_tokens=prompt,
            max_tokens=100,
            slo=slo,
        )
    )


def batch_of(*running: RunningView, free_kv_tokens: int = 1_000_000) -> BatchState:
    return BatchState(
        running=running,
        num_waiting=0,
        max_running=64,
        max_budget_tokens=4096,
        free_kv_tokens=free_kv_tokens,
    )


def started(
    policy: QoServePolicy, name: str, slo: Slo, prompt: int, arrived_at: float = 0.0
) -> Running:
    """Start a request that has just got its first token; return the request."""
    add(policy, name, slo, prompt, arrived_at)
    assert RequestId(name) in list(policy.decide(arrived_at, batch_of()).order)
    nothing = Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.0)
    outcome = IterationOutcome(iteration=nothing, admitted=(RequestId(name),))
    policy.observe(arrived_at, outcome)
    return Running(
        request_id=RequestId(name),
        num_prefill_tokens=prompt,
        num_computed_tokens=prompt,
        num_output_tokens=1,
    )


def test_offline_decodes_alone_do_not_give_up_their_last_kv() -> None:
    """An engine preempts only without free KV, because the next block may be needed much later."""
    policy = QoServePolicy(LATENCY, OPTIONS)
    running = started(policy, "dump", DUMP, 1000)

    assert policy.decide(1.0, batch_of(running, free_kv_tokens=0)).preempted == frozenset()


def test_aged_best_effort_begins_beyond_the_decode_share() -> None:
    """50,000 tokens of context take 50 of 95 ms, more than the decode share."""
    policy = QoServePolicy(LATENCY, OPTIONS)
    running = started(policy, "chat", CHAT, 50_000, arrived_at=1000.0)
    add(policy, "old", DUMP, 100, arrived_at=950.0)
    batch = batch_of(running)
    young = [list(policy.decide(1001.0, batch).order) for _ in range(OPTIONS.aged_share)]
    aged = [list(policy.decide(1051.0, batch).order) for _ in range(OPTIONS.aged_share)]

    assert young.count([RequestId("old")]) == 0
    assert aged.count([RequestId("old")]) == 1


def test_an_engine_with_zero_iteration_time_has_a_chunk() -> None:
    chunk = chunk_tokens(
        LatencyTable((0.0,) * 1025),
        PlannedBatch(),
        before_tokens=0,
        limit_s=float("inf"),
        max_tokens=1024,
        curve=True,
    )

    assert chunk > 0
