"""Text from tokens as they come, never half a character."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextDecoder(Protocol):
    """
    Turns one answer's tokens into text, piece by piece.

    All pieces and the flush, joined, are what decoding all the tokens at once gives.
    """

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that *token_ids* complete; a character's first bytes are held back."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        ...


class ByteLevelDecoder:
    """For byte-level BPE, where a token is a string of bytes: cost independent of length."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._pieces.get(token, b"") for token in token_ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """
    For every other tokenizer: decodes a window of recent tokens, twice.

    The window starts a piece early, since decoders treat the first token in a special way.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0

    def push(self, token_ids: Iterable[int]) -> str:
        # One by one: what is held back must not depend on how the tokens came together, or a
        # resumed run would repeat or skip text.
        return "".join(self._push_one(token) for token in token_ids)

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        return "" if text.endswith(_REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        piece = text[len(self._decode(self._window[: self._num_emitted])) :]
        if piece:
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)
        return piece


def byte_pieces(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Bytes of every token of a byte-level tokenizer but the special ones."""
    byte_of = _byte_alphabet()
    special = {
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    pieces = {}
    for content, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token not in special:
            spelled = [byte_of.get(character) for character in content]
            # Added tokens are spelled as plain text, unless every character is in the alphabet.
            pieces[token] = (
                content.encode()
                if None in spelled
                else bytes(byte for byte in spelled if byte is not None)
            )
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table
