"""Expected answer lengths of an application."""

from math import inf

import numpy as np
import pytest

from shared.contracts.estimates import OutputTokens
from solver.prediction.calibration.moments import over_approximation
from solver.prediction.lengths.decode_lengths import (
    ALL_APPLICATIONS,
    LEVELS,
    POOLED_REQUESTS,
    PRIOR,
    Answer,
    DecodeLengths,
)
from solver.prediction.lengths.length_sketch import log_normal

PRIOR_MEAN = log_normal(mean_tokens=PRIOR.mean, sd_tokens=PRIOR.sd).mean_tokens


def lengths(*, memory: float = 1e12, **options: float) -> DecodeLengths:
    return DecodeLengths(memory=memory, **options)  # type: ignore[arg-type]  # test data


def answered(known: DecodeLengths, application: str, *tokens: int) -> DecodeLengths:
    for at, each in enumerate(tokens):
        known.observe(application, Answer(each), at=float(at))
    return known


def test_an_application_with_many_answers_has_their_moments():
    found = answered(lengths(), "chat", *[10, 20, 30] * 1000).estimate("chat")

    assert found.count == 3000
    assert found.mean == pytest.approx(20, rel=0.02)
    assert over_approximation(found) == pytest.approx(20 + 2 * 8.165, rel=0.1)
    assert dict(found.quantiles) == {0.5: 20, 0.9: 30, 0.99: 30}


def test_a_model_without_answers_has_the_prior():
    found = lengths().estimate("chat")

    assert (found.count, found.mean) == (0, pytest.approx(PRIOR.mean, rel=0.01))
    assert [level for level, _ in found.quantiles] == list(LEVELS)


def test_nothing_is_estimated_before_the_first_answer():
    assert lengths().estimates() == {}


def test_an_unknown_application_has_the_estimate_of_all():
    known = answered(lengths(), "chat", *[50] * 100)

    assert known.estimate("new") == known.estimate(ALL_APPLICATIONS)
    assert list(known.estimates()) == [ALL_APPLICATIONS, "chat"]


def test_few_answers_are_pooled_with_ten_answers_of_all_applications():
    known = answered(lengths(), "chat", *[100] * 990)
    answered(known, "mail", *[20] * 10)
    of_all = (990 * 100 + 10 * 20 + POOLED_REQUESTS * PRIOR_MEAN) / (1000 + POOLED_REQUESTS)

    assert known.estimate(ALL_APPLICATIONS).mean == pytest.approx(of_all, abs=1e-3)
    assert known.estimate("mail").mean == pytest.approx(
        (10 * 20 + POOLED_REQUESTS * of_all) / (10 + POOLED_REQUESTS), abs=1e-3
    )


def test_old_answer_lengths_are_forgotten():
    known = answered(lengths(memory=20), "chat", *[900] * 200, *[10] * 200)

    assert known.estimate("chat").quantiles[0] == (0.5, 10)
    assert known.estimate("chat").mean < 200


def test_cut_answers_count_as_longer_than_observed():
    """
    A third of the answers were cut at 50 tokens; each of them counts as long as the answers that
    continued beyond 50 tokens.
    """
    known = lengths()
    for _ in range(500):
        known.observe("chat", Answer(50, 50, cut=True), at=0.0)
        known.observe("chat", Answer(200, 4096), at=0.0)
        known.observe("chat", Answer(20, 50), at=0.0)

    assert known.estimate("chat").mean == pytest.approx(20 / 3 + 200 * 2 / 3, rel=0.05)


def test_the_least_recent_application_is_forgotten_first():
    known = lengths(max_applications=2)
    for application in ("a", "b", "a", "c"):
        answered(known, application, 10)

    assert list(known.estimates()) == [ALL_APPLICATIONS, "a", "c"]
    assert known.estimate("b") == known.estimate(ALL_APPLICATIONS)


def test_zero_applications_can_be_kept():
    known = answered(lengths(max_applications=0), "a", 10, 20)

    assert {name: each.count for name, each in known.estimates().items()} == {"*": 2}


def test_an_application_named_like_all_counts_once():
    known = answered(lengths(), ALL_APPLICATIONS, 10, 20)

    assert {name: each.count for name, each in known.estimates().items()} == {"*": 2}


class TestCalibration:
    def test_residuals_are_relative_to_the_capped_mean(self):
        known = answered(lengths(), "chat", *[100] * 500)
        before = known.estimate("chat").calibration
        known.observe("chat", Answer(40, 60), at=9.0)
        after = known.estimate("chat").calibration

        assert before is not None
        assert after is not None
        assert after.count == before.count + 1
        assert after.bias * after.count == pytest.approx(
            before.bias * before.count + (60 - 40), abs=0.1
        )

    def test_an_answer_that_was_cut_early_was_not_allowed_more(self):
        """The context was full before `max_tokens`, so the cut length was the longest possible."""
        known = answered(lengths(), "chat", *[100] * 500)
        before = known.estimate("chat").calibration
        known.observe("chat", Answer(40, 4096, cut=True), at=9.0)

        assert before is not None
        after = known.estimate("chat").calibration
        assert after is not None
        assert after.coverage == before.coverage
        assert after.bias * after.count == pytest.approx(before.bias * before.count, abs=0.1)

    def test_all_applications_are_judged_by_their_own_predictions(self):
        known = lengths()
        for _ in range(500):
            answered(known, "short", 10)
            answered(known, "long", 1000)
        calibration = known.estimate(ALL_APPLICATIONS).calibration

        assert calibration is not None
        assert known.estimate(ALL_APPLICATIONS).sd > 400
        assert calibration.spread < 100

    def test_the_first_answer_is_not_judged(self):
        assert answered(lengths(), "chat", 10).estimate("chat").calibration is None

    def test_quantiles_have_their_coverage(self):
        random = np.random.default_rng(4)
        known = answered(lengths(), "chat", *map(int, random.geometric(1 / 200, 3000)))
        calibration = known.estimate("chat").calibration

        assert calibration is not None
        for level, share in calibration.coverage:
            assert share == pytest.approx(level, abs=0.03)

    def test_limits_do_not_make_coverage_look_better(self):
        """Answers with a limit of 20 do not count for quantiles above 20."""
        random = np.random.default_rng(5)
        known = lengths()
        for tokens in map(int, random.geometric(1 / 200, 3000)):
            for limit in (20.0, inf):
                answer = Answer(int(min(tokens, limit)), limit, cut=tokens > limit)
                known.observe("chat", answer, at=0.0)
        calibration = known.estimate("chat").calibration

        assert calibration is not None
        for level, share in calibration.coverage:
            assert share == pytest.approx(level, abs=0.03)


class TestRestored:
    EARLIER = OutputTokens(mean=60.0, sd=5.0, count=500, quantiles=((0.5, 59.0),))

    def test_an_earlier_estimate_is_returned_unchanged(self):
        known = lengths()
        earlier = {"*": self.EARLIER, "mail": OutputTokens(mean=9, sd=1, count=4)}
        known.restore(earlier)

        assert known.estimates() == earlier

    def test_an_earlier_estimate_replaces_the_parent(self):
        known = lengths()
        known.restore({"*": OutputTokens(mean=500.0, sd=5.0, count=500), "mail": self.EARLIER})
        answered(known, "mail", *[20] * 10)

        assert known.estimate("mail").mean == pytest.approx(
            (10 * 20 + POOLED_REQUESTS * 60) / (10 + POOLED_REQUESTS), rel=0.01
        )
        assert known.estimate(ALL_APPLICATIONS).mean == pytest.approx(
            (10 * 20 + POOLED_REQUESTS * 500) / (10 + POOLED_REQUESTS), rel=0.01
        )

    def test_restored_applications_respect_the_limit(self):
        known = lengths(max_applications=3)
        known.restore({str(n): self.EARLIER for n in range(9)} | {"*": self.EARLIER})

        assert list(known.estimates()) == ["*", "6", "7", "8"]
