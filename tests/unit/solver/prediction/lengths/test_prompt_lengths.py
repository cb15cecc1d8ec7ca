"""Prompt lengths of text are predicted by the registry's ratio, then by engines' counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.requests import PromptText
from solver.prediction.lengths.prompt_lengths import PromptLengths

MODEL, OTHER = ModelName("m"), ModelName("other")
BELIEVED = 4.0
"""The registry's bytes per token."""


def text_of(num_bytes: int, num_messages: int = 0) -> PromptText:
    return PromptText(num_bytes=num_bytes, num_messages=num_messages)


def learnt(pairs: list[tuple[PromptText, int]]) -> PromptLengths:
    lengths = PromptLengths()
    for text, tokens in pairs:
        lengths.observe(MODEL, text, tokens, bytes_per_token=BELIEVED)
    return lengths


def tokens_of(lengths: PromptLengths, text: PromptText, model: ModelName = MODEL) -> int:
    return lengths.tokens(model, text, bytes_per_token=BELIEVED)


@pytest.mark.parametrize(("num_bytes", "tokens"), [(0, 1), (1, 1), (4, 1), (40, 10), (4000, 1000)])
def test_the_registrys_ratio_is_used_at_first(num_bytes: int, tokens: int):
    assert tokens_of(PromptLengths(), text_of(num_bytes)) == tokens


def test_another_tokenizer_is_learned_within_some_prompts():
    lengths = learnt([(text_of(250 * n), 100 * n) for n in range(1, 31)])

    assert tokens_of(lengths, text_of(5000)) == pytest.approx(2000, rel=0.05)
    assert lengths.bytes_per_token()[MODEL] == pytest.approx(2.5, rel=0.05)
    assert tokens_of(lengths, text_of(400), OTHER) == 100


def test_template_tokens_are_separated_from_text():
    random = np.random.default_rng(1)
    chats = [
        (text_of(int(3 * words), messages), int(words) + 12 * messages)
        for words, messages in zip(
            random.integers(20, 400, 300), random.integers(1, 9, 300).tolist(), strict=True
        )
    ]
    lengths = learnt(chats)

    for text, tokens in (
        (text_of(900, 1), 312), (text_of(900, 8), 396), (text_of(60, 2), 44), (text_of(900), 300),
    ):  # fmt: skip
        assert tokens_of(lengths, text) == pytest.approx(tokens, rel=0.1)


def test_a_change_of_the_prompts_is_followed():
    lengths = learnt([(text_of(400), 100)] * 2000 + [(text_of(400), 200)] * 1500)

    assert tokens_of(lengths, text_of(800)) == pytest.approx(400, rel=0.1)


def test_one_unusual_prompt_changes_nothing():
    usual = [(text_of(400), 110)] * 50

    before, after = learnt(usual), learnt([*usual, (text_of(4), 900), (text_of(900_000), 1)])

    assert after.bytes_per_token() == before.bytes_per_token()


counted = st.lists(
    st.tuples(
        st.builds(
            PromptText,
            num_bytes=st.integers(0, 1_000_000),
            num_messages=st.integers(0, 1000),
        ),
        st.integers(-1, 300_000),
    ),
    max_size=40,
)


@given(counted, st.integers(0, 1_000_000), st.integers(0, 100))
def test_longer_text_is_never_predicted_shorter_and_every_text_has_a_token(
    pairs: list[tuple[PromptText, int]], num_bytes: int, num_messages: int
):
    lengths = learnt(pairs)

    tokens = tokens_of(lengths, text_of(num_bytes, num_messages))
    assert tokens >= 1
    assert tokens_of(lengths, text_of(2 * num_bytes + 1, num_messages)) >= tokens
    assert tokens_of(lengths, text_of(num_bytes, num_messages + 1)) >= tokens
