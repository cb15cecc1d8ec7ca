"""Expected length of an answer: a high quantile that is at most the request's limit."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import OutputTokens, Profile
from shared.contracts.requests import ApiCall
from solver.prediction.lengths.predicted_work import UNKNOWN_TOKENS, PredictedWork
from tests.clocks import NOW
from tests.queued import MODEL, OTHER, a_request, sampling


def lengths(p90: float) -> OutputTokens:
    return OutputTokens(mean=p90 / 2, sd=10.0, count=50, quantiles=((0.5, p90 / 2), (0.9, p90)))


def profile(version: int = 1, **by_application: float) -> Profile:
    reported = {name.replace("every", "*"): lengths(p90) for name, p90 in by_application.items()}
    return Profile(
        model=MODEL, engine="e", device="d", version=version, at=NOW, output_tokens=reported
    )


def request(limit: int = 1000, **fields: object):  # type: ignore[no-untyped-def]
    return a_request(sampling=sampling(limit, ignore_eos=False), **fields)


def test_until_lengths_are_known_an_answer_has_the_assumed_length():
    assert PredictedWork().answer_tokens(request()) == UNKNOWN_TOKENS
    assert PredictedWork().answer_tokens(request(limit=50)) == 50


def test_known_applications_use_their_lengths_and_others_the_pooled_lengths():
    work = PredictedWork()
    work.learn(profile(chat=200.0, every=400.0))

    assert work.answer_tokens(request(application="chat")) == 200
    assert work.answer_tokens(request(application="new")) == 400
    assert work.answer_tokens(request(base=OTHER)) == UNKNOWN_TOKENS


def test_expected_length_respects_the_requests_limit():
    work = PredictedWork()
    work.learn(profile(every=400.0))

    assert work.answer_tokens(request(limit=50)) == 50


def test_pooled_inputs_have_no_answer():
    work = PredictedWork()
    work.learn(profile(every=400.0))
    call = ApiCall(endpoint="/v1/embeddings", body=msgspec.Raw(b"{}"), pools=True)

    assert work.answer_tokens(request(prompt=None, call=call)) == 0


def test_answers_that_ignore_the_end_are_as_long_as_their_limit():
    work = PredictedWork()
    work.learn(profile(every=400.0))

    assert work.answer_tokens(a_request(sampling=sampling(900))) == 900


def test_an_older_profile_changes_nothing():
    work = PredictedWork()
    work.learn(profile(version=2, every=400.0))
    work.learn(profile(version=1, every=40.0))
    work.learn(profile(version=3))

    assert work.answer_tokens(request()) == 400


@given(st.floats(0, 1e5), st.integers(1, 10_000))
def test_expected_length_is_from_one_token_to_the_limit(p90: float, limit: int):
    work = PredictedWork()
    work.learn(profile(every=p90))

    assert 1 <= work.answer_tokens(request(limit=limit)) <= limit
