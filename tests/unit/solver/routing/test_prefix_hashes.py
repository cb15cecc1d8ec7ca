"""Equal prefixes have equal hashes; different prefixes have different hashes."""

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.requests import ChatMessage
from solver.routing.prefix_hashes import (
    MOST_PARTS,
    PART_BYTES,
    PART_TOKENS,
    part_tokens,
    prefix_hashes,
)


def said(*contents: str) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role="user", content=each) for each in contents)


def test_only_full_parts_have_a_hash():
    assert prefix_hashes("x" * (PART_BYTES - 1), None) == ()
    assert len(prefix_hashes("x" * 2 * PART_BYTES, None)) == 2
    assert len(prefix_hashes((7,) * (3 * PART_TOKENS + 1), None)) == 3


def test_a_hash_covers_all_text_before_it():
    first = prefix_hashes("a" * PART_BYTES + "c" * PART_BYTES, None)
    second = prefix_hashes("b" * PART_BYTES + "c" * PART_BYTES, None)

    assert first[1] != second[1]


def test_a_next_turn_shares_the_hashes_of_the_previous():
    before = said("s" * 700, "q" * 700)
    after = (*before, *said("and now?" * 100))

    assert prefix_hashes(None, after)[: len(prefix_hashes(None, before))] == prefix_hashes(
        None, before
    )


def test_text_in_parts_has_the_same_hashes():
    listed = (ChatMessage(role="user", content=[{"type": "text", "text": "t" * 1000}]),)

    assert prefix_hashes(None, listed) == prefix_hashes(None, said("t" * 1000))


def test_long_prompts_are_distinguished_up_to_a_bound():
    assert len(prefix_hashes((1,) * (PART_TOKENS * (MOST_PARTS + 9)), None)) == MOST_PARTS
    assert part_tokens(MOST_PARTS, 10**6) == PART_TOKENS


@given(
    common=st.lists(st.integers(0, 500), max_size=600),
    one=st.lists(st.integers(0, 500), max_size=300),
    other=st.lists(st.integers(0, 500), max_size=300),
)
def test_prompts_share_exactly_their_common_prefixes(
    common: list[int], one: list[int], other: list[int]
):
    first, second = (*common, *one), (*common, *other)
    hashes = [prefix_hashes(each, None) for each in (first, second)]
    shared = 0
    while shared < min(map(len, (first, second))) and first[shared] == second[shared]:
        shared += 1

    equal = [a == b for a, b in zip(*hashes, strict=False)]
    assert equal == [True] * (shared // PART_TOKENS) + [False] * (
        len(equal) - shared // PART_TOKENS
    )


def test_prompts_with_ids_outside_any_vocabulary_have_no_hashes():
    for token_id in (-1, 2**32, 2**64 - 1):
        assert prefix_hashes((token_id, *[7] * 2 * PART_TOKENS), None) == ()
