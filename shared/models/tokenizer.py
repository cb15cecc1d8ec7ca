"""Text to tokens and back, exactly as the engine's model expects."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import tokenizers
from tokenizers import decoders

from shared.contracts.errors import ContractError, SettingsError
from shared.contracts.requests import ChatMessage, Tokens
from shared.models.chat import ChatTemplate
from shared.models.detokenizer import ByteLevelDecoder, TextDecoder, WindowDecoder, byte_pieces

Prompt = str | Tokens | tuple[ChatMessage, ...]


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pieces = (
            byte_pieces(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None
        )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """
        The tokenizer of the model in directory *path*.

        Raises:
            SettingsError: No readable `tokenizer.json`, or a broken configuration.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"the model has no tokenizer: {file} is missing")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
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
        """Token ids are below this."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, prompt: Prompt) -> Tokens:
        """
        The tokens of *prompt*. Token ids pass as they are; chat goes through the template.

        Raises:
            ContractError: Ids outside the vocabulary; chat that the model cannot take.
        """
        if isinstance(prompt, str):
            return self._ids(prompt, add_special_tokens=True)
        if prompt and isinstance(prompt[0], ChatMessage):
            return self._encode_chat(prompt)
        return self._checked(cast("Tokens", prompt))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of *token_ids*, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def decoder(self, prior: Sequence[int] = ()) -> TextDecoder:
        """
        A decoder of one answer as it comes.

        Args:
            prior: The answer's first tokens, whose text the reader already has.
        """
        decoder: TextDecoder = (
            WindowDecoder(self.decode) if self._pieces is None else ByteLevelDecoder(self._pieces)
        )
        decoder.push(prior)
        return decoder

    def _encode_chat(self, messages: tuple[ChatMessage, ...]) -> Tokens:
        if self._template is None:
            raise ContractError(
                "the model has no chat template: send a text prompt", param="messages"
            )
        text = self._template.render(messages)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> Tokens:
        # `encode` holds the interpreter's lock for the whole text; the batch form lets go of it,
        # so that a long prompt in a thread does not stop the event loop.
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
