"""Conversion between text and tokens, with the same results as in the engine."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from shared.contracts.errors import ContractError, SettingsError
from shared.contracts.requests import ChatMessage, Tokens
from shared.models.chat import ChatTemplate


class TextDecoder:
    """
    Converts the tokens of one answer into text incrementally.

    The joined pieces, including the last one from `flush`, equal the text of all tokens decoded in
    one call. The text held back does not depend on how tokens are batched, so a resumed run neither
    repeats nor skips text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """
        Return the text that *token_ids* complete; the bytes of incomplete characters are held back.
        """
        pieces = []
        for token in token_ids:
            piece = self._stream.step(self._tokenizer, token)
            if piece is None:
                self._held.append(token)
            else:
                self._held.clear()
                pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the text that is still held back; call at the end of the answer."""
        return self._tokenizer.decode(self._held, skip_special_tokens=True)


Prompt = str | Tokens | tuple[ChatMessage, ...]


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """
        Load the tokenizer of the model in directory *path*.

        Raises:
            SettingsError: `tokenizer.json` cannot be read, or the configuration is invalid.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"the model has no tokenizer: {file} is missing")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower exception type
            raise SettingsError(f"cannot read the tokenizer {file}: {error}") from error
        config_file = path / "tokenizer_config.json"
        config: dict[str, Any] = {}
        if config_file.exists():
            try:
                config = msgspec.json.decode(config_file.read_bytes(), type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise SettingsError(f"{config_file}: {error}") from error
        return cls(tokenizer, ChatTemplate.load(path, config))

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the tokenizer's token ids."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, prompt: Prompt, *, most_tokens: int | None = None) -> Tokens:
        """
        Encode *prompt*: token ids are returned unchanged, and chat is rendered by the template
        first.

        Args:
            prompt: Text, a chat or token ids.
            most_tokens: Length of the model's context; None: no limit. Text that cannot fit is not
                encoded, since that takes seconds and gigabytes for some megabytes of text.

        Raises:
            ContractError: An id is outside the vocabulary, the text cannot fit, or the model does
                not accept the chat.
        """
        if isinstance(prompt, str):
            self._check_length(prompt, most_tokens, "prompt")
            return self._ids(prompt, add_special_tokens=True)
        if prompt and isinstance(prompt[0], ChatMessage):
            return self._encode_chat(prompt, most_tokens)
        return self._checked(cast("Tokens", prompt))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode *token_ids* to text without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def decoder(self, prior: Sequence[int] = ()) -> TextDecoder:
        """
        Create an incremental decoder of one answer.

        Args:
            prior: First tokens of the answer, whose text was already sent.
        """
        decoder = TextDecoder(self._tokenizer)
        decoder.push(prior)
        return decoder

    @cached_property
    def _longest_token(self) -> int:
        """Number of characters of the longest token: a token stands for at most so many."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(map(len, vocabulary), default=1)

    def _check_length(self, text: str, most_tokens: int | None, param: str) -> None:
        if most_tokens is None:
            return
        most = most_tokens * self._longest_token
        if len(text) > most:
            raise ContractError(
                f"the text has {len(text)} characters: at most {most} fit into the model's "
                f"{most_tokens} tokens",
                code="context_length_exceeded",
                param=param,
            )

    def _encode_chat(self, messages: tuple[ChatMessage, ...], most_tokens: int | None) -> Tokens:
        if self._template is None:
            raise ContractError(
                "the model has no chat template: send a text prompt", param="messages"
            )
        text = self._template.render(messages)
        self._check_length(text, most_tokens, "messages")
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> Tokens:
        # `encode` holds the interpreter lock for the whole text; the batch form releases it, so
        # that a long prompt in a thread does not block the event loop.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _checked(self, token_ids: Tokens) -> Tokens:
        size = self.vocab_size
        for token in token_ids:
            if not 0 <= token < size:
                raise ContractError(
                    f"token id {token} is outside the model's vocabulary of {size}", param="prompt"
                )
        return token_ids
