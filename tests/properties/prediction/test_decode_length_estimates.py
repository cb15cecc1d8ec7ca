"""Estimates of answer lengths, for arbitrary observations."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.prediction.lengths.decode_lengths import ALL_APPLICATIONS, Answer, DecodeLengths
from solver.prediction.lengths.length_sketch import (
    GROWTH,
    LONGEST_TOKENS,
    LengthDistribution,
    LengthSketch,
    log_normal,
)

tokens = st.integers(1, LONGEST_TOKENS)
answers = st.lists(st.tuples(tokens, st.booleans()), min_size=1, max_size=40)
parents = st.builds(
    lambda mean, ratio: log_normal(mean_tokens=mean, sd_tokens=mean * ratio),
    st.floats(1, 1e5),
    st.floats(0, 4),
)
levels = st.floats(0.001, 1)


def sketch_of(seen: Sequence[tuple[int, bool]], *, memory: float) -> LengthSketch:
    """A sketch of (length, true if the answer was cut)."""
    sketch = LengthSketch(memory=memory)
    for length, cut in seen:
        if cut:
            sketch.observe_cut(length)
        else:
            sketch.observe(length)
    return sketch


@given(answers, parents, st.floats(0, 100), st.floats(1, 1e6))
def test_a_sketch_is_a_distribution_with_rising_quantiles(
    seen: list[tuple[int, bool]], parent: LengthDistribution, weight: float, memory: float
):
    found = sketch_of(seen, memory=memory).pooled(parent, weight=weight)
    quantiles = [found.quantile_tokens(level) for level in (0.01, 0.5, 0.9, 0.99, 1.0)]

    assert found.mass.min() >= 0
    assert found.mass.sum() == pytest.approx(1)
    assert quantiles == sorted(quantiles)
    assert 1 <= found.mean_tokens <= LONGEST_TOKENS * (1 + 1e-9)
    assert np.isfinite(found.sd_tokens)


@given(st.lists(tokens, min_size=1, max_size=60), st.floats(1, 100), levels)
def test_without_cuts_the_distribution_is_the_weighted_sample(
    seen: list[int], memory: float, level: float
):
    found = sketch_of([(each, False) for each in seen], memory=memory).pooled(
        log_normal(mean_tokens=1, sd_tokens=0), weight=0
    )
    weights = np.exp(-np.arange(len(seen))[::-1] / memory)
    order = np.argsort(seen, kind="stable")
    within = np.cumsum(weights[order]) / weights.sum()
    exact = np.array(seen)[order][np.argmax(within >= level - 1e-9)]

    assert found.mean_tokens == pytest.approx(np.average(seen, weights=weights))
    assert exact <= found.quantile_tokens(level) < GROWTH * exact


@given(answers, parents, st.floats(0.1, 100), st.data())
def test_cut_answers_never_shorten_the_estimate(
    seen: list[tuple[int, bool]], parent: LengthDistribution, weight: float, data: st.DataObject
):
    place = data.draw(st.integers(0, len(seen) - 1))
    length, _ = seen[place]
    means = []
    for cut in (False, True):
        variant = [*seen[:place], (length, cut), *seen[place + 1 :]]
        found = sketch_of(variant, memory=1e9).pooled(parent, weight=weight)
        means.append(found.mean_tokens)

    # The length of a cut answer lies beyond its bin; an uncut answer counts inside its bin.
    assert means[0] <= means[1] * GROWTH


@given(st.lists(tokens, min_size=1, max_size=40), parents, st.floats(0.1, 100))
def test_a_pooled_mean_lies_between_the_sample_and_the_parent(
    seen: list[int], parent: LengthDistribution, weight: float
):
    found = sketch_of([(each, False) for each in seen], memory=1e12).pooled(parent, weight=weight)
    total = sum(seen) + weight * parent.mean_tokens

    assert found.mean_tokens == pytest.approx(total / (len(seen) + weight))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef*"), tokens, st.floats(1, 2**20), st.booleans()),
        max_size=30,
    ),
    st.integers(0, 4),
)
def test_the_number_of_applications_is_bounded_and_the_latest_are_kept(
    seen: list[tuple[str, int, float, bool]], most: int
):
    known = DecodeLengths(max_applications=most)
    for at, (application, length, limit, cut) in enumerate(seen):
        known.observe(application, Answer(length, limit, cut), at=float(at))
    names = [application for application, *_ in seen if application != ALL_APPLICATIONS]
    latest = list(dict.fromkeys(reversed(names)))[:most][::-1]
    estimates = known.estimates()

    assert list(estimates) == ([ALL_APPLICATIONS, *latest] if seen else [])
    for estimate in estimates.values():
        shares = estimate.calibration.coverage if estimate.calibration else ()
        assert all(0 <= share <= 1 for _, share in shares)
