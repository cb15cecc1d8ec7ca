"""Dynamic chunking: slack and chunk size."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.admission import PlannedBatch
from solver.scheduling.engine.chunking import chunk_tokens, decode_slack_s
from solver.scheduling.engine.decision import RequestView
from solver.scheduling.engine.entry import Entry, Rank
from solver.scheduling.engine.latency import LatencyTable

CHAT = Slo(ttft_s=6, tbt_s=0.05)
STEPS = LatencyTable(tuple(0.004 + 0.01 * (-(-n // 128)) + 1e-5 * n for n in range(4097)))
"""Times that rise in steps of 128 tokens, as with kernels that compute in tiles."""


def entry_of(slo: Slo, decode_tokens: float = 10) -> Entry:
    view = RequestView(
        request_id=RequestId("r"), arrived_at=100.0, prompt_tokens=10, max_tokens=99, slo=slo
    )
    return Entry(view, 1, decode_tokens=decode_tokens)


def chunk(limit_s: float, *, curve: bool = False, decodes: int = 0) -> int:
    return chunk_tokens(
        STEPS,
        PlannedBatch(tokens=decodes),
        before_tokens=0,
        limit_s=limit_s,
        max_tokens=2500,
        curve=curve,
    )


def test_slack_is_the_time_to_the_next_tokens_deadline() -> None:
    # Two tokens exist: the third is due at arrival + TTFT + 2 TBT (QoServe eq. 2).
    assert decode_slack_s(entry_of(CHAT), 2, 101.0) == pytest.approx(100 + 6 + 0.1 - 101)


def test_a_request_that_fell_behind_gets_a_slack_of_one_tbt() -> None:
    entry = entry_of(CHAT)
    decode_slack_s(entry, 1, 105.0)

    assert decode_slack_s(entry, 2, 200.0) == 0.05


def test_a_request_whose_first_token_was_late_sets_no_limit() -> None:
    entry = entry_of(CHAT)

    assert decode_slack_s(entry, 1, 107.0) == inf
    assert decode_slack_s(entry, 2, 107.01) == inf


def test_a_decode_without_tbt_divides_its_time_among_its_tokens() -> None:
    assert decode_slack_s(entry_of(Slo(ttlt_s=60)), 4, 130.0) == 30 / 6


def test_late_batch_work_does_not_make_chunks_small() -> None:
    assert decode_slack_s(entry_of(Slo(ttlt_s=60)), 4, 161.0) == inf


def test_relegated_and_best_effort_decodes_set_no_limit() -> None:
    relegated = entry_of(Slo(ttlt_s=60))
    relegated.rank = Rank.RELEGATED

    assert decode_slack_s(relegated, 1, 159.0) == inf
    assert decode_slack_s(entry_of(Slo()), 1, 101.0) == inf


def test_without_decodes_the_chunk_is_the_maximum() -> None:
    assert chunk(inf) == 2500


def test_decodes_count_towards_the_chunk() -> None:
    assert chunk(inf, decodes=100) == 2400


def test_exhausted_slack_leaves_no_chunk() -> None:
    assert chunk(0.001) == 0


def test_the_curve_stays_below_the_next_step() -> None:
    limit_s = STEPS.predict_s(300, 0, 0)

    assert chunk(limit_s) == 300
    assert chunk(limit_s, curve=True) == 256
    assert chunk(limit_s, curve=True, decodes=6) == 250


@given(limits=st.tuples(st.floats(0, 1), st.floats(0, 1)), decodes=st.integers(0, 300))
def test_more_slack_never_makes_the_largest_chunk_smaller(
    limits: tuple[float, float], decodes: int
) -> None:
    less, more = (chunk(limit_s, decodes=decodes) for limit_s in sorted(limits))

    assert less <= more


@given(limit_s=st.floats(0, 1), decodes=st.integers(0, 300))
def test_a_curve_chunk_is_within_the_slack(limit_s: float, decodes: int) -> None:
    assert chunk(limit_s, curve=True, decodes=decodes) <= chunk(limit_s, decodes=decodes)
