"""Who will be late, and when an engine is overloaded."""

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.decision import RequestView
from solver.scheduling.eager_relegation import LoadLevel, will_violate
from solver.scheduling.entry import Entry


def late(slo: Slo, now: float) -> bool:
    view = RequestView(
        request_id=RequestId("r"), arrived_at=0.0, prompt_tokens=1000, max_tokens=99, slo=slo
    )
    return will_violate(
        Entry(view, 1, decode_tokens=20), now=now, prefill_tokens=1000, token_s=1e-3, decode_s=0.1
    )


def test_an_interactive_request_needs_time_for_its_prefill() -> None:
    assert [late(Slo(ttft_s=6, tbt_s=0.05), now) for now in (4.9, 5.1)] == [False, True]


def test_others_need_time_for_the_answer_too() -> None:
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
