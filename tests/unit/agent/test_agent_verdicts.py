"""Verdicts on the SLO targets of an answer, from the times of its tokens."""

import pytest

from services.agent.answer import AnswerStream
from services.agent.backends.base import EngineOutput
from shared.contracts.base import RunId
from shared.contracts.qos import Slo
from tests.clocks import NOW
from tests.queued import BATCH, a_request


def push(answer: AnswerStream, after_s: float) -> None:
    answer.push(EngineOutput(token_ids=(20,)), RunId("run"), NOW + after_s)


@pytest.mark.parametrize(
    ("slo", "token_times_s", "attained", "late_tokens"),
    [
        # Equation 1: the first token is due at arrival + 2.
        (Slo(ttft_s=2.0), (2.0,), True, 0),
        (Slo(ttft_s=2.0), (2.1,), False, 0),
        # Without a TBT target only the first token counts.
        (Slo(ttft_s=2.0), (1.0, 50.0), True, 0),
        # Equation 2: token n is due at arrival + 2 + (n - 1) / 2.
        (Slo(ttft_s=2.0, tbt_s=0.5), (2.0, 2.5, 3.0), True, 0),
        (Slo(ttft_s=2.0, tbt_s=0.5), (1.0, 2.5, 3.0), True, 0),
        (Slo(ttft_s=2.0, tbt_s=0.5), (1.0, 2.6, 3.0), False, 1),
        (Slo(ttft_s=2.0, tbt_s=0.5), (2.1, 2.6, 3.1), False, 3),
        # Equation 3: the last token is due at arrival + 4.
        (Slo(ttlt_s=4.0), (3.0, 4.0), True, 0),
        (Slo(ttlt_s=4.0), (1.0, 4.1), False, 0),
        # With several targets, all must be met, and the earlier deadline applies.
        (Slo(ttft_s=2.0, ttlt_s=4.0), (1.0, 4.1), False, 0),
        (Slo(ttlt_s=9.0, deadline_at=NOW + 3), (1.0, 3.1), False, 0),
        # Best effort is always attained.
        (Slo(), (1e6,), True, 0),
    ],
)
def test_verdicts_follow_equations_1_to_3(
    slo: Slo, token_times_s: tuple[float, ...], attained: object, late_tokens: int
):
    answer = AnswerStream(a_request(slo=slo))
    for after_s in token_times_s:
        push(answer, after_s)
    verdict = answer.verdict(finished_at=NOW + token_times_s[-1])

    assert (verdict.attained, verdict.late_tokens) == (attained, late_tokens)
    assert verdict.ttft_s == pytest.approx(token_times_s[0])
    assert verdict.ttlt_s == pytest.approx(token_times_s[-1])


def test_verdict_without_tokens_uses_the_end():
    answer = AnswerStream(a_request(slo=Slo(ttft_s=2.0)))

    assert [answer.verdict(finished_at=NOW + at).attained for at in (1, 3)] == [True, False]


def test_longest_pause_is_kept_across_runs():
    answer = AnswerStream(a_request(slo=BATCH))
    answer.max_tbt_s = 0.7
    for after_s in (1.0, 1.5, 1.6):
        push(answer, after_s)
    assert answer.max_tbt_s == 0.7

    push(answer, 9.6)

    assert answer.max_tbt_s == pytest.approx(8.0)
