"""Assumed content of a prefix cache: the most recently computed prompts that fit."""

from hypothesis import given
from hypothesis import strategies as st

from solver.routing.prefix_index import PrefixIndex

PART = 100.0


def test_a_computed_prompt_matches_up_to_the_first_difference():
    index = PrefixIndex(10_000)
    index.store((1, 2, 3), PART)

    assert index.matched_parts((1, 2, 9, 3)) == 2
    assert index.matched_parts((9, 1, 2)) == 0


def test_the_end_of_the_oldest_prompt_is_dropped_first():
    index = PrefixIndex(4 * PART)
    index.store((1, 2, 3), PART)
    index.store((1, 7, 8), PART)

    assert index.matched_parts((1, 7, 8)) == 3
    assert index.matched_parts((1, 2, 3)) == 2


def test_a_smaller_cache_holds_less():
    index = PrefixIndex(4 * PART)
    index.store((1, 2, 3, 4), PART)
    index.resize(2 * PART)

    assert index.matched_parts((1, 2, 3, 4)) == 2


def test_assumed_cache_size_follows_the_prefixes_that_requests_find():
    index = PrefixIndex(10_000)
    for _ in range(10):
        index.observe(500, 0)
    shrunk = index.assumed_tokens
    for _ in range(1000):
        index.observe(500, 480)

    assert shrunk < 4000
    assert index.assumed_tokens == 10_000


def test_requests_without_assumed_tokens_do_not_change_assumptions():
    index = PrefixIndex(10_000)
    index.observe(0, 0)

    assert index.assumed_tokens == 10_000


def test_clearing_removes_all_prefixes():
    index = PrefixIndex(10_000)
    index.store((1, 2), PART)
    index.clear()

    assert (len(index), index.matched_parts((1, 2))) == (0, 0)


prefixes = st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True).map(tuple)


@given(st.lists(st.tuples(prefixes, st.floats(1, 500)), max_size=40), st.floats(100, 3000))
def test_the_assumed_room_is_never_exceeded(
    stored: list[tuple[tuple[int, ...], float]], capacity: float
):
    index = PrefixIndex(capacity)
    for prefix, tokens in stored:
        index.store(prefix, tokens)

        assert sum(index._parts.values()) <= capacity + 1e-6
        assert 0 <= index.matched_parts(prefix) <= len(prefix)


def test_parts_of_zero_tokens_are_bounded():
    index = PrefixIndex(100.0)
    for number in range(1000):
        index.store([number], -1.0 if number % 2 else 0.0)

    assert len(index) <= 100
