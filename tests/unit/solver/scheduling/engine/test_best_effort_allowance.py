"""Limits of best-effort work in an iteration and in KV memory."""

from dataclasses import replace
from math import inf

from shared.contracts.base import RequestId
from solver.scheduling.engine.admission import PlannedBatch
from solver.scheduling.engine.best_effort import Allowance
from tests.unit.solver.scheduling.best_effort_rig import LATENCY, OPTIONS, batch_of, entry_of
from tests.unit.solver.scheduling.running import Running


def allowance(
    *running: Running, reserve: float = 0.1, share: float = 0.5, limit_s: float = 0.1
) -> Allowance:
    return Allowance(
        replace(OPTIONS, best_effort_kv_reserve=reserve, best_effort_decode_share=share),
        LATENCY,
        batch_of(*running),
        decodes=PlannedBatch(tokens=len(running), context_tokens=10_000 * len(running)),
        prefills=(),
        limit_s=limit_s,
    )


def test_a_share_of_all_kv_is_reserved() -> None:
    """The reserve is a tenth of all 30,000 tokens, of which 20,000 are used."""
    running = [Running(request_id=RequestId(name), num_computed_tokens=10_000) for name in "ab"]

    assert allowance(*running).kv_reserve_tokens == 3000


def test_best_effort_starts_while_all_decodes_fit_into_their_share() -> None:
    """Two decodes take 20.2 of 50 ms; a third takes 0.1 ms plus 1 µs per token."""
    running = [Running(request_id=RequestId(name), num_computed_tokens=10_000) for name in "ab"]
    allowed = allowance(*running)

    assert allowed.admits(entry_of(1, prompt=29_000))
    assert not allowed.admits(entry_of(2, prompt=30_000))


def test_requests_started_in_the_same_iteration_count() -> None:
    running = [Running(request_id=RequestId(name), num_computed_tokens=10_000) for name in "ab"]
    allowed = allowance(*running)
    allowed.count(entry_of(1, prompt=20_000))

    assert allowed.admits(entry_of(2, prompt=9000))
    assert not allowed.admits(entry_of(3, prompt=10_000))


def test_an_idle_engine_starts_any_best_effort_request() -> None:
    allowed = allowance(reserve=1.0, share=0.0)

    assert allowed.kv_reserve_tokens == 0
    assert allowed.admits(entry_of(1, prompt=10**6))


def test_without_online_work_decodes_have_no_limit() -> None:
    run = Running(request_id=RequestId("a"), num_computed_tokens=10_000)

    assert allowance(run, limit_s=inf).admits(entry_of(1, prompt=10**6))
