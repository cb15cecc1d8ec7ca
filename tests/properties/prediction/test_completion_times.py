"""Waiting and completion times, for arbitrary queues."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.prediction.completion import (
    Ahead,
    GroupWork,
    TokenMoments,
    completion_time,
    group_completion_time,
    waiting_time,
)
from solver.prediction.service_parameters import ServiceParameters

ROUNDING = 1e-12
"""Relative error of an interpolation."""

levels = st.floats(0.02, 0.98)
counts = st.integers(0, 5000)
places = st.integers(1, 600).flatmap(
    lambda size: st.tuples(counts, st.just(size), st.integers(0, size - 1))
)
"""Number of requests before a group, the group's size, and the index of a member."""
moments = st.builds(
    lambda mean, variation: TokenMoments.of(mean, mean * variation),
    st.floats(1.0, 4000.0),
    st.floats(0.0, 2.0),
)
services = st.builds(
    lambda rate, error, decode_s, inefficiency, batch: ServiceParameters(
        token_rate_per_s=rate,
        rate_error=error,
        prefill_s=0.1,
        prefill_var=0.01,
        decode_s_per_token=decode_s,
        inefficiency=inefficiency,
        batch=batch,
    ),
    st.floats(10.0, 1e5),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.2),
    st.floats(1.0, 4.0),
    st.floats(1.0, 256.0),
)


@given(counts, counts, moments, services, levels)
def test_more_requests_ahead_mean_a_longer_wait_at_every_level(
    fewer: int, more: int, tokens: TokenMoments, service: ServiceParameters, level: float
):
    few, many = (
        waiting_time(Ahead.of(float(count), tokens), service).quantile(level)
        for count in sorted((fewer, more))
    )

    assert few <= many * (1 + 1e-9)


@given(st.integers(1, 5000), moments, st.floats(1.0, 10.0), services, levels)
def test_longer_requests_ahead_take_longer(
    count: int, tokens: TokenMoments, factor: float, service: ServiceParameters, level: float
):
    longer = TokenMoments(tokens.mean * factor, tokens.variance * factor**2)
    short, long = (
        waiting_time(Ahead.of(float(count), each), service).quantile(level)
        for each in (tokens, longer)
    )

    assert short <= long * (1 + 1e-9)


@given(counts, counts, moments, moments, services)
def test_variances_of_requests_ahead_add_up(
    first: int, second: int, one: TokenMoments, other: TokenMoments, service: ServiceParameters
):
    parts = Ahead.of(float(first), one), Ahead.of(float(second), other)
    exact = ServiceParameters(token_rate_per_s=service.token_rate_per_s)
    both = waiting_time(parts[0].plus(parts[1]), exact)
    apart = waiting_time(parts[0], exact).plus(waiting_time(parts[1], exact))

    np.testing.assert_allclose(both.variance, apart.variance, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(both.mean_s, apart.mean_s, rtol=1e-9)


@settings(deadline=None, max_examples=50)
@given(places, moments, moments, services)
def test_a_group_never_ends_before_one_of_its_requests(
    place: tuple[int, int, int],
    prompt: TokenMoments,
    output: TokenMoments,
    service: ServiceParameters,
):
    """The test compares quantiles of the group with those of any member, at any level."""
    before, size, member = place
    work = GroupWork(num_requests=np.array(float(size)), prompt=prompt, output=output)
    single = GroupWork(num_requests=np.array(1.0), prompt=prompt, output=output)
    last = waiting_time(Ahead.of(float(before + size - 1), work.tokens), service)
    own = waiting_time(Ahead.of(float(before + member), work.tokens), service)
    group = group_completion_time(last, work, service)
    one = group_completion_time(own, single, service)

    assert np.all(group.points_s >= one.points_s * (1 - 1e-9))


@settings(deadline=None, max_examples=50)
@given(places, moments, services, levels, levels)
def test_quantiles_rise_with_their_level(
    place: tuple[int, int, int],
    output: TokenMoments,
    service: ServiceParameters,
    one: float,
    other: float,
):
    before, size, _ = place
    wait = waiting_time(Ahead.of(float(before + size - 1), output), service, output=output)
    work = GroupWork(num_requests=np.array(float(size)), prompt=output, output=output)
    group = group_completion_time(wait, work, service)
    low, high = sorted((one, other))

    assert wait.quantile(low) <= wait.quantile(high)
    # The interpolation between points rounds.
    assert group.quantile(low) <= group.quantile(high) * (1 + ROUNDING)
    single = completion_time(wait, output, service)
    assert single.quantile(low) <= single.quantile(high)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), moments, services)
@settings(deadline=None, max_examples=30)
def test_groups_are_predicted_equally_alone_and_together(
    sizes: list[int], output: TokenMoments, service: ServiceParameters
):
    count = np.array(sizes, np.float64)
    outputs = TokenMoments(np.full(len(sizes), output.mean), np.full(len(sizes), output.variance))
    work = GroupWork(num_requests=count, prompt=outputs, output=outputs)
    wait = waiting_time(Ahead.of(count, work.tokens), service)
    together = group_completion_time(wait, work, service)
    for index, size in enumerate(sizes):
        alone = group_completion_time(
            waiting_time(Ahead.of(float(size), output.plus(output)), service),
            GroupWork(num_requests=np.array(float(size)), prompt=output, output=output),
            service,
        )
        assert together.mean_s[index] == pytest.approx(float(alone.mean_s), rel=0.05)
