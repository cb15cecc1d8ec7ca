"""Chunks of the forest, for arbitrary requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.baselines.prediction.iteration_forest import Decodes, IterationForest
from ops.baselines.prediction.iteration_forest_fit import fit_iteration_forest
from tests.unit.ops.baselines.tiled_iterations import iterations

budgets = st.floats(0, 0.3)
others = st.builds(Decodes, st.integers(0, 200), st.integers(0, 100_000))
limits = st.integers(0, 4096)


@pytest.fixture(scope="module")
def forest() -> IterationForest:
    return fit_iteration_forest(iterations(400))


@given(budget_s=budgets, beside=others, most=limits)
def test_a_chunk_fits_its_budget_and_its_limit(
    forest: IterationForest, budget_s: float, beside: Decodes, most: int
):
    chunk = forest.largest_chunk(budget_s, beside, most_tokens=most)

    assert 0 <= chunk <= most
    if chunk:
        row = [chunk + beside.num_decodes, beside.context_tokens, beside.num_decodes]
        assert forest.cautious_s(np.array([row], dtype=float))[0] <= budget_s


@given(pair=st.tuples(budgets, budgets), beside=others, most=limits)
def test_more_time_never_gives_fewer_tokens(
    forest: IterationForest, pair: tuple[float, float], beside: Decodes, most: int
):
    less, more = (
        forest.largest_chunk(budget_s, beside, most_tokens=most) for budget_s in sorted(pair)
    )
    assert less <= more


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**8), st.integers(0, 10**4)), min_size=1
    )
)
def test_times_are_positive_and_finite(forest: IterationForest, rows: list[tuple[int, int, int]]):
    asked = np.array(rows, dtype=float)

    for times_s in (forest.predict_s(asked), forest.cautious_s(asked)):
        assert np.all(np.isfinite(times_s) & (times_s > 0))
