"""QLM's equations 1 to 5, as distributions."""

import math

import numpy as np
import pytest

from solver.prediction.completion import (
    Ahead,
    GroupWork,
    TokenMoments,
    completion_time,
    group_completion_time,
    waiting_time,
)
from solver.prediction.service_parameters import ServiceParameters
from solver.prediction.time_distribution import TimeDistribution

A100 = ServiceParameters(
    token_rate_per_s=2000.0,
    prefill_s=0.2,
    prefill_var=0.01,
    decode_s_per_token=0.02,
    inefficiency=1.5,
    batch=64.0,
)
PROMPT, OUTPUT = TokenMoments.of(161.0), TokenMoments.of(338.0, 300.0)


def test_waiting_is_the_tokens_ahead_over_the_throughput():
    """Equations 2 and 3 for 100 answers (mean 338 tokens, deviation 300) at 2000 tokens/s."""
    wait = waiting_time(Ahead.of(100.0, OUTPUT), A100)

    assert float(wait.mean_s) == pytest.approx(100 * 338 / 2000)
    assert float(wait.sd_s) == pytest.approx(math.sqrt(100) * 300 / 2000)


def test_prompts_ahead_also_take_time():
    wait = waiting_time(Ahead.of(100.0, PROMPT.plus(OUTPUT)), A100)

    assert float(wait.mean_s) == pytest.approx(100 * (161 + 338) / 2000)


def test_a_rate_error_spreads_long_waits_in_proportion():
    erring = ServiceParameters(token_rate_per_s=2000.0, rate_error=0.1)
    counts = np.array([1e2, 1e4])
    waits = waiting_time(Ahead.of(counts, TokenMoments.of(338.0)), erring)

    np.testing.assert_allclose(waits.sd_s / waits.mean_s, [0.1, 0.1])


def test_an_engine_with_free_slots_takes_some_requests_at_once():
    """An empty engine with 64 slots starts 64 requests without a wait."""
    ahead = Ahead.of(np.array([10.0, 1000.0]), OUTPUT)
    full = waiting_time(ahead, A100, output=OUTPUT)
    empty = waiting_time(ahead, A100, output=OUTPUT, running=0.0)
    remainder = 338 * (1 + (300 / 338) ** 2) / 2

    np.testing.assert_allclose(full.mean_s, [1.69, 169.0])
    assert float(empty.mean_s[0]) == 0.0
    assert full.mean_s[1] - empty.mean_s[1] == pytest.approx(64 * remainder / 2000)


def test_running_requests_add_to_the_uncertainty():
    ahead = Ahead.of(1000.0, OUTPUT)

    assert waiting_time(ahead, A100, output=OUTPUT).sd_s > waiting_time(ahead, A100).sd_s


def test_completion_is_waiting_prefill_and_decode():
    """QLM's equations 1 and 4 for 338 tokens of 20 ms each, 1.5 times as long in a batch."""
    wait = TimeDistribution.of(10.0, 4.0)
    found = completion_time(wait, OUTPUT, A100)

    assert float(found.mean_s) == pytest.approx(10 + 0.2 + 338 * 1.5 * 0.02)
    assert float(found.variance) == pytest.approx(4 + 0.01 + (300 * 1.5 * 0.02) ** 2)


def test_a_group_of_one_ends_with_its_request():
    wait = TimeDistribution.of([10.0, 40.0], [4.0, 9.0])
    output = TokenMoments.of([338.0, 100.0], [200.0, 20.0])
    work = GroupWork(num_requests=np.ones(2), prompt=TokenMoments.of([9.0, 9.0]), output=output)
    group, one = group_completion_time(wait, work, A100), completion_time(wait, output, A100)

    np.testing.assert_allclose(group.mean_s, one.mean_s, rtol=0.01)
    np.testing.assert_allclose(np.sqrt(group.variance), one.sd_s, rtol=0.1)
    for level in (0.05, 0.5, 0.95):
        np.testing.assert_allclose(group.quantile(level), one.quantile(level), rtol=0.1)
    assert group.cdf(group.quantile(0.5)) == pytest.approx([0.5, 0.5], abs=1 / 32)


@pytest.mark.parametrize("count", [4, 40, 400])
def test_a_group_ends_with_its_last_request(count: int):
    """QLM's equation 5 is compared with 4000 random groups."""
    random = np.random.default_rng(count)
    sigma = math.sqrt(math.log1p((300 / 338) ** 2))
    outputs = random.lognormal(math.log(338) - sigma**2 / 2, sigma, (4000, 50 + count))
    turns_s = np.cumsum(outputs + 161, axis=1)[:, 49:-1] / 2000
    ends_s = turns_s + 0.2 + outputs[:, 50:] * 1.5 * 0.02
    drawn_s = ends_s.max(axis=1)
    service = ServiceParameters(
        token_rate_per_s=2000.0, prefill_s=0.2, decode_s_per_token=0.02, inefficiency=1.5
    )
    work = GroupWork(num_requests=np.array(float(count)), prompt=PROMPT, output=OUTPUT)
    wait = waiting_time(Ahead.of(50.0 + count - 1, work.tokens), service)
    found = group_completion_time(wait, work, service)

    assert float(found.mean_s) == pytest.approx(drawn_s.mean(), rel=0.03)
    assert float(found.variance) ** 0.5 == pytest.approx(drawn_s.std(), rel=0.25)
    for level in (0.05, 0.5, 0.95):
        assert float(found.quantile(level)) == pytest.approx(np.quantile(drawn_s, level), rel=0.05)


def test_answers_of_equal_length_end_in_order():
    work = GroupWork(num_requests=np.array(100.0), prompt=PROMPT, output=TokenMoments.of(200.0))
    found = group_completion_time(TimeDistribution.of(7.0), work, A100)

    assert float(found.mean_s) == pytest.approx(7.0 + 0.2 + 200 * 0.03, rel=0.01)


def test_a_limit_on_answers_bounds_the_last_one():
    """An answer of 500 tokens, the limit, takes 15 s; the last of 100 without limit takes more."""
    wait = TimeDistribution.of(7.0)
    free = GroupWork(num_requests=np.array(100.0), prompt=PROMPT, output=OUTPUT)
    limited = GroupWork(
        num_requests=np.array(100.0), prompt=PROMPT, output=OUTPUT, most_output=500.0
    )

    assert float(group_completion_time(wait, free, A100).quantile(0.9)) > 7.2 + 15
    assert float(group_completion_time(wait, limited, A100).quantile(0.9)) < 7.4 + 15


def test_an_empty_group_is_rejected():
    work = GroupWork(num_requests=np.zeros(1), prompt=PROMPT, output=OUTPUT)
    with pytest.raises(ValueError, match="num_requests of a group must be 1 or more"):
        group_completion_time(TimeDistribution.of([1.0]), work, A100)


def test_tokens_and_counts_out_of_their_limits_are_rejected():
    with pytest.raises(ValueError, match="mean and sd of tokens"):
        TokenMoments.of(10.0, -1.0)
    with pytest.raises(ValueError, match="num_requests ahead"):
        Ahead.of(-1.0, OUTPUT)
