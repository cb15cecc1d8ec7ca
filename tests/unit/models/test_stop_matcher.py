"""Detection of stop strings in streamed text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.models.stop import StopMatcher

texts = st.text("ab\n", max_size=20)
stop_lists = st.lists(st.text("ab\n", max_size=4), max_size=3)
splits = st.lists(st.integers(0, 20), max_size=6).map(sorted)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
    return shown + matcher.flush(), stopped


@given(stop_lists, texts, splits)
def test_the_result_does_not_depend_on_the_chunks_of_the_text(
    stops: list[str], text: str, splits: list[int]
) -> None:
    edges = [0, *splits, len(text)]
    pieces = [text[low:high] for low, high in pairwise(edges)]

    assert run(stops, pieces) == run(stops, [text])


@given(stop_lists, texts)
def test_the_answer_is_the_text_before_the_stop(stops: list[str], text: str) -> None:
    shown, stopped = run(stops, [text])

    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops if stop)
    assert stopped or shown == text


@given(stop_lists, texts)
def test_no_part_of_a_stop_string_is_shown(stops: list[str], text: str) -> None:
    shown, _ = run(stops, list(text))

    assert not any(stop in shown for stop in stops if stop)


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo"),
        (["bb", "abb"], "aabb", "a"),
        (["b", "abc"], "abc", "a"),
        (["aab"], "aaab", "a"),
    ],
)
def test_stop_strings_end_example_texts(stops: list[str], text: str, shown: str) -> None:
    assert run(stops, list(text)) == (shown, True)


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    matcher = StopMatcher(["END"])

    assert matcher.push("the E") == ("the ", False)
    assert matcher.push("nd") == ("End", False)


def test_no_text_follows_a_stop() -> None:
    matcher = StopMatcher(["."])
    matcher.push("a.b")

    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""
