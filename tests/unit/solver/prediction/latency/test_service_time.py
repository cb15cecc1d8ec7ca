"""Time that a request occupies an instance."""

import msgspec
import pytest

from shared.api.pooling import NO_SAMPLING
from shared.contracts.base import ModelName
from shared.contracts.estimates import LatencyCoefficients, Moments, OutputTokens, Profile
from shared.contracts.requests import ApiCall, Progress, QueuedRequest
from solver.prediction.latency.service_time import (
    capped,
    predicted_decode_s,
    predicted_output_tokens,
    predicted_prefill_s,
    predicted_rest_s,
    tokens_s,
)
from tests.queued import a_request, sampling

PROFILE = Profile(
    model=ModelName("m"),
    engine="e",
    device="d",
    version=1,
    at=0.0,
    latency=LatencyCoefficients(constant_s=0.01, linear_s=0.001),
    token_rate_per_s=200.0,
    output_tokens={
        "*": OutputTokens(mean=50.0, sd=10.0, count=9),
        "chat": OutputTokens(
            mean=20.0, sd=5.0, count=9, quantiles=((0.5, 19.0), (0.9, 28.0), (0.99, 40.0))
        ),
    },
)
UNMEASURED = msgspec.structs.replace(PROFILE, latency=None, token_rate_per_s=None, output_tokens={})


def test_prefill_is_computed_in_chunks():
    """600 tokens are computed in two iterations (512 + 88) of 10 ms plus 1 ms per token."""
    request = a_request(prompt_tokens=600)
    assert predicted_prefill_s(request, PROFILE) == pytest.approx(0.02 + 0.6)


def test_progress_is_prefilled_again():
    request = a_request(prompt_tokens=600, progress=Progress(token_ids=(7,) * 100))
    assert predicted_prefill_s(request, PROFILE) == pytest.approx(0.02 + 0.7)


def test_tokens_that_a_prefix_cache_is_expected_to_have_take_no_time():
    """Three quarters of 600 tokens are cached; progress is not."""
    profile = msgspec.structs.replace(PROFILE, cached_share={"chat": 0.75})
    request = a_request(
        prompt_tokens=600, application="chat", progress=Progress(token_ids=(7,) * 100)
    )
    other = a_request(prompt_tokens=600, application="search")

    assert predicted_prefill_s(request, profile) == pytest.approx(0.01 + 0.25)
    assert predicted_prefill_s(other, profile) == pytest.approx(0.02 + 0.6)


def test_a_token_takes_as_long_as_the_iterations_of_the_engine():
    request = a_request(sampling=sampling(400, ignore_eos=False))
    rest_s = predicted_rest_s(request, PROFILE, output_tokens=20, pace_s=0.05)

    assert rest_s == pytest.approx(30 * 0.05)


def test_decode_takes_one_iteration_per_token():
    request = a_request(sampling=sampling(40), progress=Progress(token_ids=(7,) * 10))
    assert predicted_decode_s(request, PROFILE) == pytest.approx(30 * 0.011)


def test_a_pooled_request_is_one_prefill():
    call = ApiCall(endpoint="/v1/embeddings", body=msgspec.Raw(b"{}"), pools=True)
    pooled = a_request(
        prompt=None, call=call, prompt_tokens=600, sampling=NO_SAMPLING, expected_tokens=0
    )

    assert predicted_prefill_s(pooled, PROFILE) == pytest.approx(0.02 + 0.6)
    assert predicted_output_tokens(pooled, PROFILE) == 0
    assert predicted_decode_s(pooled, PROFILE) == 0
    assert predicted_rest_s(pooled, PROFILE, output_tokens=0) == 0


def test_more_progress_than_expected_leaves_no_decode():
    request = a_request(
        sampling=sampling(400, ignore_eos=False), progress=Progress(token_ids=(7,) * 100)
    )
    assert predicted_decode_s(request, PROFILE) == 0.0


@pytest.mark.parametrize(
    ("output_tokens", "left"), [(0, 50), (20, 30), (45, 5), (60, 5), (397, 3), (400, 0)]
)
def test_the_remaining_answer_is_positive_until_the_limit(output_tokens: int, left: int):
    request = a_request(sampling=sampling(400, ignore_eos=False))
    rest_s = predicted_rest_s(request, PROFILE, output_tokens=output_tokens)
    assert rest_s == pytest.approx(left * 0.011)


def test_progress_counts_as_already_answered():
    request = a_request(sampling=sampling(40), progress=Progress(token_ids=(7,) * 10))
    assert predicted_rest_s(request, PROFILE, output_tokens=15) == pytest.approx(25 * 0.011)


@pytest.mark.parametrize(
    ("application", "max_tokens", "expected"),
    [("chat", 100, 20.0), ("other", 100, 50.0), ("other", 30, 30)],
)
def test_output_is_the_applications_mean(application: str, max_tokens: int, expected: float):
    request = a_request(application=application, sampling=sampling(max_tokens, ignore_eos=False))
    assert predicted_output_tokens(request, PROFILE) == expected


def test_output_is_the_limit_if_the_end_is_ignored_or_unknown():
    assert predicted_output_tokens(a_request(sampling=sampling(99)), PROFILE) == 99
    request = a_request(sampling=sampling(99, ignore_eos=False))
    assert predicted_output_tokens(request, None) == 99
    assert predicted_output_tokens(request, UNMEASURED) == 99


def answering(application: str, max_tokens: int) -> QueuedRequest:
    """A request whose answer the model ends."""
    return a_request(application=application, sampling=sampling(max_tokens, ignore_eos=False))


def test_the_estimate_is_the_limit_if_the_end_is_ignored_or_unknown():
    forced = a_request(application="chat", sampling=sampling(99))
    for request, profile in ((forced, PROFILE), (answering("chat", 99), UNMEASURED)):
        assert predicted_output_tokens(request, profile) == 99


def test_the_spread_of_lengths_is_bounded_by_their_limit():
    lengths = Moments(mean=20.0, sd=30.0, count=9)

    assert capped(lengths, limit_tokens=1000) == lengths
    assert capped(lengths, limit_tokens=25).sd == pytest.approx((20 * 5) ** 0.5)
    assert capped(lengths, limit_tokens=15) == Moments(mean=15.0, sd=0.0, count=9)


@pytest.mark.parametrize("profile", [None, UNMEASURED])
def test_unmeasured_models_have_zero_predicted_times(profile: Profile | None):
    request = a_request(prompt_tokens=600)
    assert predicted_prefill_s(request, profile) == 0.0
    assert predicted_decode_s(request, profile) == 0.0
    assert predicted_rest_s(request, profile, output_tokens=5) == 0.0


def test_backlog_in_seconds_has_a_prior():
    assert [tokens_s(100, profile) for profile in (PROFILE, UNMEASURED, None)] == [0.5, 0.2, 0.2]
