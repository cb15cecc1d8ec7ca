"""Input of the work classification: prompt plus a high quantile of the answer."""

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import OutputTokens, Profile
from solver.prediction.lengths.predicted_work import PredictedWork
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
    return a_request(prompt_tokens=100, sampling=sampling(limit, ignore_eos=False), **fields)


def test_the_limit_counts_until_lengths_are_known():
    assert PredictedWork().tokens(request()) == 1100


def test_known_applications_use_their_lengths_and_others_the_pooled_lengths():
    work = PredictedWork()
    work.learn(profile(chat=200.0, every=400.0))

    assert work.tokens(request(application="chat")) == 300
    assert work.tokens(request(application="new")) == 500
    assert work.tokens(request(base=OTHER)) == 1100


def test_predicted_work_respects_the_requests_limit():
    work = PredictedWork()
    work.learn(profile(every=400.0))

    assert work.tokens(request(limit=50)) == 150


def test_answers_that_ignore_the_end_are_as_long_as_their_limit():
    work = PredictedWork()
    work.learn(profile(every=400.0))

    assert work.tokens(a_request(prompt_tokens=100, sampling=sampling(900))) == 1000


def test_an_older_profile_changes_nothing():
    work = PredictedWork()
    work.learn(profile(version=2, every=400.0))
    work.learn(profile(version=1, every=40.0))
    work.learn(profile(version=3))

    assert work.tokens(request()) == 500


@given(st.floats(1, 1e5), st.integers(1, 10_000))
def test_work_is_between_the_prompt_and_the_limit(p90: float, limit: int):
    work = PredictedWork()
    work.learn(profile(every=p90))

    assert 100 < work.tokens(request(limit=limit)) <= 100 + limit
