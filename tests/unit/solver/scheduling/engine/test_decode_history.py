"""Expected answer lengths."""

import pytest

from solver.scheduling.engine.qoserve import DecodeHistory, rest_of


def test_the_bound_is_mean_plus_two_deviations_of_the_application() -> None:
    history = DecodeHistory(default_tokens=50)
    for _ in range(50):
        history.observe("chat", 10)
        history.observe("chat", 30)

    assert history.expected("chat").bound == pytest.approx(20 + 2 * 10, rel=0.02)
    assert history.expected("chat").mean == pytest.approx(20, rel=0.01)


def test_an_application_without_history_has_the_default() -> None:
    history = DecodeHistory(default_tokens=50)
    history.observe("chat", 10)

    assert history.expected("chat").bound == history.expected("chat").mean == 50


def test_the_rest_respects_the_limit() -> None:
    assert rest_of(50, 7, progress_tokens=0) == 7


@pytest.mark.parametrize(("progress_tokens", "rest_tokens"), [(0, 50), (20, 30), (49, 5), (80, 5)])
def test_progress_shortens_the_rest_of_an_answer(progress_tokens: int, rest_tokens: int) -> None:
    assert rest_of(50, 1000, progress_tokens=progress_tokens) == rest_tokens


def test_the_application_without_an_answer_for_longest_is_forgotten() -> None:
    history = DecodeHistory(default_tokens=50, max_applications=2)
    for application in ("a", "b", "a", "c"):
        for _ in range(10):
            history.observe(application, 7)

    assert [history.expected(each).bound for each in ("a", "b", "c")] == [7, 50, 7]
