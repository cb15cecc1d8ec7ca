"""Conversion between text and tokens, whole and in pieces."""

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from shared.contracts.errors import ContractError, SettingsError
from shared.contracts.requests import ChatMessage
from shared.models.chat import ChatTemplate
from shared.models.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer
from shared.models.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(train_tokenizer(), None)

token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=8).map(sorted)
texts = st.text(max_size=30).filter(
    # Hypothesis also draws constants of the code, and special tokens are not decoded.
    lambda text: not any(token in text for token in SPECIAL_TOKENS)
)


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer: words with a leading mark, and single bytes."""
    words = ["<unk>", "▁the", "▁queue", "s", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(tokenizer, None)


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    decoder = tokenizer.decoder()
    edges = [0, *cuts, len(ids)]
    pieces = [decoder.push(ids[low:high]) for low, high in pairwise(edges)]
    return "".join(pieces) + decoder.flush()


@given(token_ids, cuts)
def test_joined_pieces_equal_the_whole_text(ids: list[int], cuts: list[int]) -> None:
    assert in_pieces(BYTE_LEVEL, ids, [min(cut, len(ids)) for cut in cuts]) == BYTE_LEVEL.decode(
        ids
    )


@given(texts, cuts)
def test_pieces_of_real_text_never_split_characters(text: str, cuts: list[int]) -> None:
    ids = list(BYTE_LEVEL.encode(text))
    decoder = BYTE_LEVEL.decoder()
    pieces = [decoder.push([token]) for token in ids]

    assert "".join(pieces) == text
    assert decoder.flush() == ""
    assert in_pieces(BYTE_LEVEL, ids, [min(cut, len(ids)) for cut in cuts]) == text


@given(st.lists(st.sampled_from(["▁the", "▁queue", "s", "é", "日", "🎉"]), max_size=12))
def test_other_tokenizers_also_stream_whole_characters(words: list[str]) -> None:
    tokenizer = byte_fallback()
    vocabulary = tokenizer._tokenizer.get_vocab()
    ids = [
        token
        for word in words
        for token in (
            [vocabulary[word]]
            if word in vocabulary
            else [vocabulary[f"<0x{byte:02X}>"] for byte in word.encode()]
        )
    ]
    decoder = tokenizer.decoder()
    pieces = [decoder.push([token]) for token in ids]

    assert "".join(pieces) == tokenizer.decode(ids)
    assert decoder.flush() == ""


@given(token_ids, st.integers(0, 40))
def test_a_decoder_continues_after_prior_tokens(ids: list[int], cut: int) -> None:
    first = BYTE_LEVEL.decoder()
    before = first.push(ids[:cut])
    second = BYTE_LEVEL.decoder(ids[:cut])

    assert before + second.push(ids[cut:]) + second.flush() == BYTE_LEVEL.decode(ids)


def test_token_ids_are_passed_through() -> None:
    assert BYTE_LEVEL.encode((0, 5, VOCAB_SIZE - 1)) == (0, 5, VOCAB_SIZE - 1)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ContractError, match="vocabulary") as refused:
        BYTE_LEVEL.encode((1, token))

    assert refused.value.param == "prompt"


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ContractError, match="no chat template") as refused:
        BYTE_LEVEL.encode((ChatMessage(role="user", content="hi"),))

    assert refused.value.param == "messages"


def test_non_text_parts_are_refused() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {})

    with pytest.raises(ContractError, match="image_url") as refused:
        template.render([ChatMessage(role="user", content=[{"type": "image_url"}])])
    assert refused.value.param == "messages"


def test_a_refusal_by_the_template_includes_its_reason() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})

    with pytest.raises(ContractError, match="roles must alternate"):
        template.render([ChatMessage(role="user", content="hi")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ content.index('x') }}",
        "{{ 1 // (content | length - 2) }}",
        "{{ 2.0 ** (content | length * 1000) }}",
        "{{ '{1}'.format(content) }}",
        "{{ content | dictsort }}",
        "{{ content + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_messages_that_make_the_template_fail_are_refused(source: str) -> None:
    template = ChatTemplate("{% set content = messages[0]['content'] %}" + source, {})

    with pytest.raises(ContractError, match="chat template") as refused:
        template.render([ChatMessage(role="user", content="hi")])

    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_template_cannot_escape_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})

    with pytest.raises(ContractError, match="chat template"):
        template.render([ChatMessage(role="user", content="hi")])


def test_a_missing_tokenizer_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(SettingsError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path)


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "_ids", lambda *_, **__: pytest.fail("it was encoded"))
    with pytest.raises(ContractError, match="1950000 characters: at most") as refused:
        BYTE_LEVEL.encode("a" * 1_950_000, most_tokens=4096)

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


@given(st.text(max_size=400), st.integers(1, 60))
def test_text_that_fits_is_never_refused_for_its_length(text: str, most_tokens: int) -> None:
    ids = BYTE_LEVEL.encode(text)
    try:
        assert BYTE_LEVEL.encode(text, most_tokens=most_tokens) == ids
    except ContractError:
        assert len(ids) > most_tokens
