"""The online latency model, for arbitrary observations."""

from collections.abc import Sequence

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.latency_model import OnlineLatencyFit, predict_batch_s, predict_s

GRID = [(p, c) for p in (1, 64, 512, 2048) for c in (0, 4000, 40_000)]
truths = st.builds(
    LatencyCoefficients,
    constant_s=st.floats(1e-3, 2e-2),
    linear_s=st.floats(1e-6, 1e-4),
    attention_s=st.floats(0, 1e-8),
    cross_s=st.floats(0, 2e-9),
    context_s=st.floats(0, 5e-7),
)
iterations = st.builds(
    Iteration,
    compute_tokens=st.integers(0, 100_000),
    context_tokens=st.integers(0, 10_000_000),
    num_decodes=st.integers(0, 256),
    duration_s=st.floats(-1, 1e6) | st.sampled_from([0.0, 1e-9, float("inf"), float("nan")]),
)


def sampled(truth: LatencyCoefficients, random: np.random.Generator, count: int) -> list[Iteration]:
    sample = []
    for _ in range(count):
        decodes = int(random.integers(1, 64))
        chunk = int(random.integers(1, 2048)) * int(random.random() < 0.4)
        context = int(random.integers(0, 40_000))
        exact_s = predict_s(truth, compute_tokens=decodes + chunk, context_tokens=context)
        sample.append(
            Iteration(
                compute_tokens=decodes + chunk, context_tokens=context, num_decodes=decodes,
                duration_s=exact_s * float(random.lognormal(0.0, 0.05)),
            )
        )  # fmt: skip
    return sample


def predictions(sample: list[Iteration], grid: Sequence[tuple[int, int]] = GRID) -> np.ndarray:
    fit = OnlineLatencyFit(memory=800)
    for each in sample:
        fit.observe(each)
    found = fit.fit()
    assert found is not None
    return np.array([predict_s(found, compute_tokens=p, context_tokens=c) for p, c in grid])


@given(st.lists(iterations, min_size=10, max_size=40))
def test_predictions_are_finite_not_negative_and_do_not_decrease_with_more_work(
    sample: list[Iteration],
):
    fit = OnlineLatencyFit(memory=30)
    for each in sample:
        fit.observe(each)
    found = fit.fit()
    if found is None:
        assert fit.count < 10
        return
    table = np.array(
        [
            [predict_s(found, compute_tokens=p, context_tokens=c) for c in (0, 10, 10_000)]
            for p in (1, 2, 100, 5000)
        ]
    )
    assert np.all(np.isfinite(table) & (table >= 0))
    assert np.all(np.diff(table, axis=0) >= 0)
    assert np.all(np.diff(table, axis=1) >= 0)


@given(
    st.lists(
        st.tuples(iterations, st.none() | st.floats(0, 1e9) | st.just(-1.0)),
        min_size=10,
        max_size=40,
    )
)
def test_with_pairs_more_work_never_takes_less_time(
    sample: list[tuple[Iteration, float | None]],
):
    """Another decode, a longer decode and a deeper prefill each increase the time."""
    fit = OnlineLatencyFit(memory=30)
    for each, pairs in sample:
        fit.observe(each, pairs)
    found = fit.fit()
    if found is None:
        assert fit.count < 10
        return
    table = np.array(
        [
            [
                [
                    predict_batch_s(found, compute_tokens=p, context_tokens=c, prefill_pairs=n)
                    for n in (0, 100, 1e7)
                ]
                for c in (0, 10, 10_000)
            ]
            for p in (1, 2, 100, 5000)
        ]
    )
    slack = 1e-9 * np.abs(table).max()
    assert np.all(np.isfinite(table) & (table >= 0))
    assert np.all(np.diff(table, axis=2) >= 0)
    assert np.all(np.diff(table, axis=1) >= 0)
    # Without reported pairs, the product of tokens and context includes the context of decodes; the
    # previous test covers this case.
    if fit._has_pairs[: fit.count].any():
        assert np.all(np.diff(table, axis=0) >= -slack)


@given(
    truth=truths,
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0, 0.2),
    factor=st.floats(2, 100) | st.floats(0.01, 0.5),
)
@example(
    # Few iterations have 2048 tokens or more, and most of these happen to be disturbed.
    truth=LatencyCoefficients(constant_s=0.015625, linear_s=6.1e-05),
    seed=122971,
    share=0.19921875,
    factor=3.0,
)
@example(
    truth=LatencyCoefficients(
        constant_s=0.0078125, linear_s=1e-06, attention_s=0.0, cross_s=1.9197769615122366e-09
    ),
    seed=2327,
    share=0.1875,
    factor=2.0,
)
@settings(max_examples=40)
def test_a_fifth_of_disturbed_iterations_moves_predictions_below_8_percent(
    truth: LatencyCoefficients, seed: int, share: float, factor: float
):
    random = np.random.default_rng(seed)
    sample = sampled(truth, random, 800)
    disturbed = list(sample)
    for place in random.choice(len(sample), int(share * len(sample)), replace=False):
        duration_s = factor * sample[place].duration_s
        disturbed[place] = msgspec.structs.replace(sample[place], duration_s=duration_s)

    moved = predictions(disturbed) / predictions(sample) - 1

    assert np.max(np.abs(moved)) < 0.08


@given(truth=truths, seed=st.integers(0, 2**32 - 1), factor=st.sampled_from([0.5, 2.0]))
@example(
    # Nearly all of the time is tokens times context, and 2048 tokens always have context: it takes
    # seven fits until iterations from before the change are no longer trusted.
    truth=LatencyCoefficients(constant_s=0.001953125, linear_s=1e-6, cross_s=1.871576492845354e-9),
    seed=317,
    factor=0.5,
)
@example(
    # This case takes more than six fits: after six, the time of 2048 tokens alone is off by 136 %.
    truth=LatencyCoefficients(
        constant_s=0.0015446921971854458,
        linear_s=1e-6,
        cross_s=7.945527907058526e-10,
        context_s=5.1579346678166064e-9,
    ),
    seed=3388905488,
    factor=0.5,
)
@settings(max_examples=20)
def test_a_change_of_speed_is_followed_within_the_memory(
    truth: LatencyCoefficients, seed: int, factor: float
):
    random = np.random.default_rng(seed)
    before, after = sampled(truth, random, 1000), sampled(truth, random, 800)
    changed = [msgspec.structs.replace(each, duration_s=factor * each.duration_s) for each in after]

    found = predictions(before + changed)

    # Few iterations with many tokens have little context, so the time of such iterations is only
    # known relative to their usual time: with half of the longest context.
    usual = [(p, max(c, 20_000) if p >= 512 else c) for p, c in GRID]
    wrong_s = np.abs(found - factor * predictions(after))
    assert np.all(wrong_s <= 0.15 * factor * predictions(after, usual))


@given(truth=truths, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_equal_iterations_give_equal_coefficients_after_any_number_of_fits(
    truth: LatencyCoefficients, seed: int
):
    sample = sampled(truth, np.random.default_rng(seed), 120)
    asked, once = OnlineLatencyFit(memory=50), OnlineLatencyFit(memory=50)
    for each in sample:
        asked.observe(each)
        asked.fit()
        once.observe(each)

    assert asked.fit() == once.fit()
