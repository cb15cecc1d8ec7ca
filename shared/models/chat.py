"""Chat templates: convert conversations to a model's prompt format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.contracts.errors import ContractError, SettingsError
from shared.contracts.requests import ChatMessage

_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""Exceptions that a template raises for messages of an unsupported form."""


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    encoded = msgspec.json.encode(value)
    return (encoded if indent is None else msgspec.json.format(encoded, indent=indent)).decode()


class ChatTemplate:
    """
    Chat template from a model's publisher.

    Templates are foreign code, so they run in a sandbox. Templates cannot read the clock: templates
    that print the date use a fixed date, so that a replay gives the same prompt.

    Raises:
        SettingsError: The template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path, config: Mapping[str, Any]) -> "ChatTemplate | None":
        """
        Load the template of the model in *directory*; None if it has none.

        Args:
            directory: Directory of the model; a `chat_template.jinja` in it takes precedence.
            config: Content of `tokenizer_config.json`.
        """
        file = directory / "chat_template.jinja"
        source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
        if isinstance(source, list):
            # Several named templates: use the one for plain chat.
            source = {item["name"]: item["template"] for item in source}.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, _special_tokens(config))

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """
        Render the prompt for an answer to *messages*.

        Raises:
            ContractError: A part is not text, or the template does not accept the conversation.
        """
        turns = [{"role": message.role, "content": _text_of(message)} for message in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, **self._special_tokens
            )
        except _FAILURES as error:
            raise ContractError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _text_of(message: ChatMessage) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise ContractError(
                f"content part of type {str(part.get('type'))[:40]!r} is not supported; only "
                '{"type": "text", "text": ...} parts are',
                param="messages",
            )
        texts.append(text)
    return "".join(texts)
