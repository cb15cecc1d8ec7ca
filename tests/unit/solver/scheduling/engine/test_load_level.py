"""Prediction of late requests, and overload of an engine."""

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.decision import RequestView
from solver.scheduling.engine.entry import Entry
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.load_level import LoadLevel
from solver.scheduling.engine.pace import EnginePace


def late(slo: Slo, now: float) -> bool:
    view = RequestView(
        request_id=RequestId("r"), arrived_at=0.0, prompt_tokens=1000, max_tokens=99, slo=slo
    )
    pace = EnginePace(LatencyTable((0.1, 0.1)), chunk_tokens=1)
    pace.token_s = 1e-3
    return pace.is_infeasible(Entry(view, 1, mean_decode_tokens=20), now)


def test_an_interactive_request_needs_time_for_its_prefill() -> None:
    assert [late(Slo(ttft_s=6, tbt_s=0.05), now) for now in (4.9, 5.1)] == [False, True]


def test_other_requests_also_need_time_for_the_answer() -> None:
    assert [late(Slo(ttlt_s=6), now) for now in (2.9, 3.1)] == [False, True]


def test_best_effort_is_never_late() -> None:
    assert not late(Slo(), 1e9)


def test_a_load_level_has_hysteresis() -> None:
    level = LoadLevel(on_s=30, off_s=3)
    seen = []
    for backlog_s in (20, 31, 20, 4, 2, 20):
        level.observe(backlog_s)
        seen.append(level.is_on)

    assert seen == [False, True, True, True, False, False]
