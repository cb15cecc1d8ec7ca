"""Fit of the latency model to iteration times."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.latency_model import (
    OnlineLatencyFit,
    predict_batch_s,
    predict_s,
)
from solver.scheduling.engine.latency import LatencyTable

TRUE = LatencyCoefficients(
    constant_s=0.005, linear_s=4e-5, attention_s=1e-8, cross_s=2e-9, context_s=2e-7
)
SLOWER = LatencyCoefficients(constant_s=0.02, linear_s=1e-4, context_s=1e-6)


def iterations(
    truth: LatencyCoefficients, count: int, *, noise: float = 0.05, seed: int = 7
) -> list[Iteration]:
    """Iterations with decodes of up to 64 requests, and chunks of up to 2048 tokens."""
    chance = np.random.default_rng(seed)
    sample = []
    for number in range(count):
        decodes = int(chance.integers(1, 64))
        chunk = int(chance.integers(1, 2048)) if number % 2 else 0
        context = int(chance.integers(0, 40_000))
        exact_s = predict_s(truth, compute_tokens=decodes + chunk, context_tokens=context)
        sample.append(
            Iteration(
                compute_tokens=decodes + chunk,
                context_tokens=context,
                num_decodes=decodes,
                duration_s=exact_s * float(chance.lognormal(0.0, noise)),
            )
        )
    return sample


def fitted(sample: list[Iteration], *, memory: float = 2000) -> OnlineLatencyFit:
    fit = OnlineLatencyFit(memory=memory)
    for iteration in sample:
        fit.observe(iteration)
    return fit


def slower(sample: list[Iteration], factor: float) -> list[Iteration]:
    return [msgspec.structs.replace(each, duration_s=factor * each.duration_s) for each in sample]


def worst_error(found: LatencyCoefficients | None, truth: LatencyCoefficients) -> float:
    """Largest prediction error over the range of the observations."""
    assert found is not None
    grid = [(p, c) for p in (1, 16, 64, 512, 2048) for c in (0, 1000, 10_000, 40_000)]
    return max(
        abs(
            predict_s(found, compute_tokens=p, context_tokens=c)
            / predict_s(truth, compute_tokens=p, context_tokens=c)
            - 1
        )
        for p, c in grid
    )


@pytest.mark.parametrize("truth", [TRUE, SLOWER])
def test_predictions_of_a_noisy_engine_are_right_within_a_tenth(truth: LatencyCoefficients):
    assert worst_error(fitted(iterations(truth, 2000)).fit(), truth) < 0.10


def test_another_engine_is_accepted_within_the_memory():
    memory = 500
    before, after = iterations(TRUE, 1000), iterations(SLOWER, 500)
    assert worst_error(fitted(before + after, memory=memory).fit(), SLOWER) < 0.10


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("seen", [100, 400, 3000])
def test_a_change_of_speed_is_followed_after_any_history(factor: float, seen: int):
    memory = 500
    begun = iterations(TRUE, seen)
    changed = slower(iterations(TRUE, 500, seed=8), factor)
    found = fitted(begun + changed, memory=memory).fit()
    assert found is not None
    for tokens in (16, 512, 2048):
        expected_s = factor * predict_s(TRUE, compute_tokens=tokens, context_tokens=10_000)
        found_s = predict_s(found, compute_tokens=tokens, context_tokens=10_000)
        assert found_s == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize("factor", [1.5, 3.0, 40.0])
def test_hundreds_of_consecutive_disturbed_iterations_change_nothing(factor: float):
    sample = iterations(TRUE, 2000)
    disturbed = sample[:1600] + slower(sample[1600:], factor)
    assert worst_error(fitted(disturbed).fit(), TRUE) < 0.05


def test_a_rare_new_kind_of_batch_is_learned_not_disturbed():
    """After decodes only, prefills of 2048 tokens are a completely different kind."""
    decodes = [each for each in iterations(TRUE, 2000) if each.compute_tokens < 64]
    assert len(decodes) > 900
    prefills = [
        Iteration(
            compute_tokens=2048, context_tokens=context, num_decodes=0,
            duration_s=predict_s(TRUE, compute_tokens=2048, context_tokens=context),
        )
        for context in range(0, 2000, 100)
    ]  # fmt: skip
    found = fitted(decodes + prefills).fit()
    assert found is not None
    assert predict_s(found, compute_tokens=2048, context_tokens=1000) == pytest.approx(
        predict_s(TRUE, compute_tokens=2048, context_tokens=1000), rel=0.05
    )


@pytest.mark.parametrize("every", [300, 500])
def test_prefills_that_stay_rare_are_learned(every: int):
    """Prefills too few to form their own kind must not be treated as disturbed decodes."""
    chance = np.random.default_rng(every)
    fit = OnlineLatencyFit(memory=2000)
    for number in range(8000):
        tokens = int(chance.integers(100, 2000)) if number % every == 0 else 1
        context = 0 if tokens > 1 else int(chance.integers(0, 2000))
        exact_s = predict_s(TRUE, compute_tokens=tokens, context_tokens=context)
        fit.observe(
            Iteration(
                compute_tokens=tokens, context_tokens=context, num_decodes=int(tokens == 1),
                duration_s=exact_s * float(chance.lognormal(0.0, 0.03)),
            )
        )  # fmt: skip
    found = fit.fit()
    assert found is not None
    for tokens in (256, 1024, 2048):
        assert predict_s(found, compute_tokens=tokens, context_tokens=0) == pytest.approx(
            predict_s(TRUE, compute_tokens=tokens, context_tokens=0), rel=0.1
        )


def test_believed_coefficients_hold_until_iterations_contradict():
    fit = OnlineLatencyFit(memory=500)
    fit.believe(TRUE)
    assert fit.count == 0
    assert worst_error(fit.fit(), TRUE) < 0.01

    decodes = [each for each in iterations(TRUE, 200) if each.compute_tokens < 64]
    for each in decodes:
        fit.observe(each)
        assert worst_error(fit.fit(), TRUE) < 0.3
    assert fit.count == len(decodes)

    for each in iterations(SLOWER, 1000):
        fit.observe(each)
    assert worst_error(fit.fit(), SLOWER) < 0.1


def test_iterations_older_than_twice_the_memory_are_forgotten():
    known = iterations(TRUE, 200)
    forgotten = fitted([*iterations(SLOWER, 600), *known], memory=100).fit()
    assert forgotten == fitted(known, memory=100).fit()


def test_a_memory_of_less_than_an_iteration_is_rejected():
    with pytest.raises(ValueError, match=r"memory must be at least 1 iteration; it is 0\.5"):
        OnlineLatencyFit(memory=0.5)


coefficients = st.floats(0, 1e-2)
sizes = st.floats(0, 1e5)


@given(
    model=st.builds(
        LatencyCoefficients,
        constant_s=coefficients,
        linear_s=coefficients,
        attention_s=coefficients,
        cross_s=coefficients,
        context_s=coefficients,
    ),
    tokens=st.tuples(sizes, sizes),
    context=st.tuples(sizes, sizes),
)
def test_more_work_never_takes_less_time(
    model: LatencyCoefficients, tokens: tuple[float, float], context: tuple[float, float]
):
    less_s = predict_s(model, compute_tokens=min(tokens), context_tokens=min(context))
    more_s = predict_s(model, compute_tokens=max(tokens), context_tokens=max(context))
    assert less_s <= more_s


@given(
    sample=st.lists(
        st.builds(
            Iteration,
            compute_tokens=st.integers(0, 4096),
            context_tokens=st.integers(0, 100_000),
            num_decodes=st.just(0),
            duration_s=st.one_of(st.floats(-1, 0), st.floats(1e-6, 10)),
        ),
        max_size=30,
    )
)
def test_no_term_is_ever_negative(sample: list[Iteration]):
    found = fitted(sample).fit()
    assert (
        found is None
        or min(found.constant_s, found.linear_s, found.attention_s, found.cross_s, found.context_s)
        >= 0
    )


def test_batch_predictions_equal_single_predictions():
    tokens, contexts = np.array([1.0, 700.0, 2048.0]), np.array([0.0, 9000.0, 40.0])
    each_s = [
        predict_s(TRUE, compute_tokens=p, context_tokens=c)
        for p, c in zip(tokens, contexts, strict=True)
    ]
    together_s = predict_s(TRUE, compute_tokens=tokens, context_tokens=contexts)
    assert together_s.tolist() == each_s


@given(tokens=st.integers(1, 2048), before=st.integers(0, 100_000))
def test_one_prefill_takes_the_same_time_with_and_without_pairs(tokens: int, before: int):
    pairs = tokens * (before + tokens / 2)
    predicted_s = predict_batch_s(
        TRUE, compute_tokens=tokens, context_tokens=before, prefill_pairs=pairs
    )
    table = LatencyTable.from_coefficients(TRUE, max_tokens=2048)

    assert predicted_s == pytest.approx(
        predict_s(TRUE, compute_tokens=tokens, context_tokens=before), rel=1e-9
    )
    assert predicted_s == pytest.approx(table.predict_s(tokens, pairs, before), rel=1e-9)


def mixed_batches(count: int, *, noise: float = 0.05) -> list[tuple[Iteration, float]]:
    """Iterations of decodes with long contexts; every second has a chunk with a context."""
    chance = np.random.default_rng(11)
    sample = []
    for number in range(count):
        decodes, contexts = int(chance.integers(1, 64)), int(chance.integers(0, 100_000))
        chunk = int(chance.integers(16, 2048)) if number % 2 else 0
        before = int(chance.integers(0, 8000)) if chunk else 0
        pairs = chunk * (before + chunk / 2)
        exact_s = predict_batch_s(
            TRUE,
            compute_tokens=decodes + chunk,
            context_tokens=contexts + before,
            prefill_pairs=pairs,
        )
        iteration = Iteration(
            compute_tokens=decodes + chunk,
            context_tokens=contexts + before,
            num_decodes=decodes,
            duration_s=exact_s * float(chance.lognormal(0.0, noise)),
        )
        sample.append((iteration, pairs))
    return sample


def behind_40000_s(found: LatencyCoefficients | None) -> float:
    """ConServe's example: time of a chunk of 2048 tokens after 40,000 (§4.2)."""
    assert found is not None
    return predict_s(found, compute_tokens=2048, context_tokens=40_000)


def test_attention_over_long_contexts_is_learned_with_pairs():
    reported, silent = OnlineLatencyFit(), OnlineLatencyFit()
    for iteration, pairs in mixed_batches(2000):
        reported.observe(iteration, pairs)
        silent.observe(iteration)

    assert behind_40000_s(reported.fit()) == pytest.approx(behind_40000_s(TRUE), rel=0.05)
    assert behind_40000_s(silent.fit()) < 0.75 * behind_40000_s(TRUE)


def test_iterations_with_pairs_replace_iterations_without_pairs():
    """During an upgrade, reports of newer agents replace reports of older agents."""
    sample = mixed_batches(2000)
    fit = OnlineLatencyFit(memory=300)
    for iteration, _ in sample[:1000]:
        fit.observe(iteration)
    before_s = behind_40000_s(fit.fit())
    for iteration, pairs in sample[1000:]:
        fit.observe(iteration, pairs)

    assert before_s < 0.75 * behind_40000_s(TRUE)
    assert behind_40000_s(fit.fit()) == pytest.approx(behind_40000_s(TRUE), rel=0.1)


def test_errors_with_pairs_are_of_predictions_that_use_them():
    fit = OnlineLatencyFit()
    for iteration, pairs in mixed_batches(1000, noise=0.0):
        fit.observe(iteration, pairs)
    fit.fit()
    for iteration, pairs in mixed_batches(200, noise=0.0):
        fit.observe(iteration, pairs)

    assert fit.errors is not None
    assert fit.errors.p95 < 1e-3


def test_negative_pairs_are_ignored():
    fit = OnlineLatencyFit()
    fit.observe(iterations(TRUE, 1)[0], -1.0)

    assert fit.count == 0


def test_no_model_is_fitted_to_a_handful_of_iterations():
    assert fitted(iterations(TRUE, 9)).fit() is None
    assert fitted(iterations(TRUE, 10)).fit() is not None


def test_undetermined_time_of_single_tokens_is_constant():
    """Decodes of 7 ms do not determine the time of 16 tokens, which must stay below 50 ms."""
    one = Iteration(compute_tokens=1, context_tokens=100, num_decodes=1, duration_s=0.007)
    coefficients = fitted([one] * 20).fit()

    assert coefficients is not None
    assert predict_s(coefficients, compute_tokens=16, context_tokens=1600) == pytest.approx(
        0.007, rel=0.3
    )


def test_iterations_without_work_or_time_are_ignored():
    idle = Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.1)
    timeless = Iteration(compute_tokens=9, context_tokens=0, num_decodes=0, duration_s=0.0)
    instant = Iteration(compute_tokens=9, context_tokens=0, num_decodes=0, duration_s=1e-9)
    endless = Iteration(compute_tokens=9, context_tokens=0, num_decodes=0, duration_s=math.inf)
    assert fitted([idle, timeless, instant, endless]).count == 0


def test_errors_are_of_predictions_made_before_their_iteration():
    fit = fitted(iterations(TRUE, 1000, noise=0.0))
    assert fit.errors is None
    fit.fit()
    for iteration in iterations(TRUE, 600, noise=0.0, seed=8):
        fit.observe(iteration)
    assert fit.errors is not None
    assert fit.errors.p95 < 0.01
    for iteration in slower(iterations(TRUE, 600, noise=0.0, seed=9), 2.0):
        fit.observe(iteration)
    assert fit.errors.median == pytest.approx(0.5, abs=0.01)
    assert fit.errors.bias == pytest.approx(-0.5, abs=0.01)


def test_rare_pauses_show_in_the_95th_percentile_not_in_the_median():
    fit = fitted(iterations(TRUE, 1000, noise=0.0))
    fit.fit()
    for number, iteration in enumerate(iterations(TRUE, 500, noise=0.0, seed=8)):
        fit.observe(iteration if number % 10 else slower([iteration], 50.0)[0])
    assert fit.errors is not None
    assert (fit.errors.median < 0.01, fit.errors.p95 > 0.9) == (True, True)
