"""Token-level admission (ConServe's `can_schedule`)."""

from hypothesis import given
from hypothesis import strategies as st

from solver.scheduling.engine.admission import PlannedBatch, admissible_tokens
from solver.scheduling.engine.latency import LatencyTable

TABLE = LatencyTable(
    tuple(0.005 + 1e-4 * (-(-n // 64)) * 64 for n in range(2049)), pair_s=1e-8, context_s=1e-7
)
BATCHES = st.builds(
    PlannedBatch,
    tokens=st.integers(0, 300),
    pairs=st.floats(0, 1e6),
    context_tokens=st.integers(0, 100_000),
)


def fits(batch: PlannedBatch, count: int, before: int, limit_s: float) -> bool:
    return (
        TABLE.predict_s(
            batch.tokens + count,
            batch.pairs + count * (before + count / 2),
            batch.context_tokens + before,
        )
        <= limit_s + 1e-12
    )


@given(batch=BATCHES, before=st.integers(0, 20_000), limit_s=st.floats(0.001, 0.4))
def test_admission_is_the_largest_part_within_the_budget(
    batch: PlannedBatch, before: int, limit_s: float
) -> None:
    count = admissible_tokens(
        TABLE, batch, before_tokens=before, wanted_tokens=1000, limit_s=limit_s
    )

    assert 0 <= count <= 1000
    assert count == 0 or fits(batch, count, before, limit_s)
    assert count == 1000 or not fits(batch, count + 1, before, limit_s - 1e-9)


@given(batch=BATCHES, before=st.integers(0, 20_000), limits=st.tuples(*[st.floats(0.001, 0.4)] * 2))
def test_more_slack_never_admits_less(
    batch: PlannedBatch, before: int, limits: tuple[float, float]
) -> None:
    less, more = (
        admissible_tokens(TABLE, batch, before_tokens=before, wanted_tokens=1000, limit_s=limit_s)
        for limit_s in sorted(limits)
    )

    assert less <= more


def test_an_exhausted_budget_admits_nothing() -> None:
    assert (
        admissible_tokens(TABLE, PlannedBatch(), before_tokens=0, wanted_tokens=10, limit_s=0.001)
        == 0
    )


def test_the_last_token_of_a_request_is_admitted_alone() -> None:
    assert (
        admissible_tokens(TABLE, PlannedBatch(), before_tokens=5000, wanted_tokens=1, limit_s=0.05)
        == 1
    )
