"""Distributions of answer lengths when some answers were cut."""

import numpy as np
import pytest

from solver.prediction.lengths.length_sketch import (
    GROWTH,
    LONGEST_TOKENS,
    NUM_BINS,
    LengthDistribution,
    LengthSketch,
    log_normal,
)

UNINFORMED = log_normal(mean_tokens=128, sd_tokens=192)


def learnt(sketch: LengthSketch) -> LengthDistribution:
    """Distribution of the observations, without a prior."""
    return sketch.pooled(UNINFORMED, weight=0)


def sketch_of(*lengths: int, memory: float = 1e12) -> LengthSketch:
    """Sketch of answers that ended by themselves."""
    sketch = LengthSketch(memory=memory)
    for tokens in lengths:
        sketch.observe(tokens)
    return sketch


def test_moments_are_exact():
    lengths = np.random.default_rng(1).geometric(1 / 300, 500)
    found = learnt(sketch_of(*map(int, lengths)))

    assert found.mean_tokens == pytest.approx(lengths.mean())
    assert found.sd_tokens == pytest.approx(lengths.std())


@pytest.mark.parametrize("level", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_covered_and_less_than_five_percent_longer(level: float):
    lengths = np.random.default_rng(2).geometric(1 / 300, 500)
    exact = np.quantile(lengths, level, method="inverted_cdf")
    found = learnt(sketch_of(*map(int, lengths))).quantile_tokens(level)

    assert exact <= found < GROWTH * exact


def test_short_lengths_are_distinguished():
    found = learnt(sketch_of(*range(1, 21)))

    assert [found.quantile_tokens(n / 20) for n in range(1, 21)] == list(range(1, 21))


def test_old_lengths_are_forgotten():
    found = learnt(sketch_of(*[1000] * 100, *[10] * 200, memory=10))

    assert (found.mean_tokens, found.quantile_tokens(0.99)) == (pytest.approx(10, abs=1e-3), 10)


def test_survival_is_the_kaplan_meier_estimate():
    """Survival for lengths 1, 2+, 3, 4+, 5: (1 - 1/5), times (1 - 1/3), times 0."""
    sketch = sketch_of(1, 3, 5)
    sketch.observe_cut(2)
    sketch.observe_cut(4)
    found = learnt(sketch)

    assert found.mass[:5] == pytest.approx([1 / 5, 0, 4 / 15, 0, 8 / 15])
    assert found.mean_tokens == pytest.approx(1 / 5 + 3 * 4 / 15 + 5 * 8 / 15)


def test_answers_that_ended_at_a_cuts_length_count_as_shorter():
    sketch = sketch_of(10, 20)
    sketch.observe_cut(10)
    found = learnt(sketch)

    assert (found.mass[9], found.mass[19]) == pytest.approx((1 / 3, 2 / 3))


def test_cut_answers_also_cause_forgetting():
    sketch = sketch_of(*[5] * 50, memory=10)
    for _ in range(100):
        sketch.observe_cut(10)

    assert learnt(sketch).mean_tokens == pytest.approx(10, abs=0.01)


def test_a_limit_that_cuts_half_of_the_answers_hides_no_length():
    random = np.random.default_rng(3)
    lengths = random.geometric(1 / 100, 4000)
    limits = random.choice([40, 70, 100, 1000], 4000)
    sketch = LengthSketch(memory=1e12)
    for tokens, limit in zip(map(int, lengths), map(int, limits), strict=True):
        if tokens > limit:
            sketch.observe_cut(limit)
        else:
            sketch.observe(tokens)
    found = learnt(sketch)

    assert np.mean(lengths > limits) > 0.35
    assert np.minimum(lengths, limits).mean() < 0.75 * lengths.mean()
    assert found.mean_tokens == pytest.approx(lengths.mean(), rel=0.06)
    assert found.quantile_tokens(0.9) == pytest.approx(np.quantile(lengths, 0.9), rel=0.1)


def test_answers_that_were_all_cut_end_like_the_parent():
    sketch = LengthSketch(memory=1e12)
    for _ in range(500):
        sketch.observe_cut(200)
    found = sketch.pooled(UNINFORMED, weight=10)

    assert found.quantile_tokens(0.05) > 200
    beyond = UNINFORMED.mass * (UNINFORMED.tokens > 205)
    assert found.mean_tokens == pytest.approx(beyond @ UNINFORMED.tokens / beyond.sum(), rel=0.02)


def test_answers_that_were_all_cut_end_at_the_limit_without_a_parent():
    sketch = LengthSketch(memory=1e12)
    sketch.observe_cut(16)
    sketch.observe_cut(12)

    assert learnt(sketch).mean_tokens == 16


def test_a_parent_counts_as_its_weight_in_answers():
    found = sketch_of(10, 20).pooled(UNINFORMED, weight=4)

    assert found.mean_tokens == pytest.approx((30 + 4 * UNINFORMED.mean_tokens) / 6)


def test_before_the_first_answer_the_parent_is_returned():
    assert LengthSketch(memory=10).pooled(UNINFORMED, weight=10) is UNINFORMED


@pytest.mark.parametrize(("mean", "sd"), [(128.0, 192.0), (20.0, 2.0), (3000.0, 500.0)])
def test_a_log_normal_distribution_has_its_moments(mean: float, sd: float):
    made = log_normal(mean_tokens=mean, sd_tokens=sd)

    assert made.mass.sum() == pytest.approx(1)
    assert made.mean_tokens == pytest.approx(mean, rel=0.02)
    assert made.sd_tokens == pytest.approx(sd, rel=0.06)


def test_without_spread_there_is_one_length():
    made = log_normal(mean_tokens=40, sd_tokens=0)

    assert (made.quantile_tokens(0.01), made.quantile_tokens(0.99)) == (40, 40)


@pytest.mark.parametrize(("tokens", "counted"), [(0, 1), (-3, 1), (10**9, LONGEST_TOKENS)])
def test_impossible_lengths_count_as_the_nearest_possible(tokens: int, counted: int):
    ended, cut = sketch_of(tokens), LengthSketch(memory=10)
    cut.observe_cut(tokens)

    assert learnt(ended).mean_tokens == counted
    assert learnt(cut).mean_tokens == counted


def test_a_sketch_takes_less_than_ten_kilobytes():
    assert sketch_of(5)._cells.nbytes < 10_000
    assert NUM_BINS < 300
