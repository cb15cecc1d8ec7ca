"""The two endpoints that generate text, and the differences between their answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.gateway.openai import ChatBody, CompletionBody

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One of the two endpoints that generate text."""

    name: str
    path: str
    body_type: type[ChatBody] | type[CompletionBody]
    id_prefix: str
    whole: str
    """Value of the field `object` in an answer that is sent as one body."""
    chunk: str
    """Value of the field `object` in a chunk of a streamed answer."""
    opening: Choice | None = None
    """
    Choice in a first chunk without text; None if the endpoint sends no first chunk of this kind.
    """
    whole_choice: Callable[[str, str], Choice]
    """Creates the choice of an answer that is sent as one body, from its text and finish reason."""
    chunk_choice: Callable[[str, str | None], Choice]
    """
    Creates the choice of a chunk from the chunk's text and the finish reason, which only the last
    chunk has.
    """


def _choice(**fields: Any) -> Choice:
    return {"index": 0, **fields, "logprobs": None}


def _message(text: str, reason: str) -> Choice:
    message = {"role": "assistant", "content": text, "refusal": None}
    return _choice(message=message, finish_reason=reason)


def _delta(text: str, reason: str | None) -> Choice:
    # In OpenAI's format the last delta is empty. Earlier deltas may have tokens without text.
    return _choice(delta={"content": text} if reason is None else {}, finish_reason=reason)


def _text(text: str, reason: str | None) -> Choice:
    return _choice(text=text, finish_reason=reason)


CHAT = Endpoint(
    name="chat",
    path="/v1/chat/completions",
    body_type=ChatBody,
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    opening=_choice(delta={"role": "assistant", "content": ""}, finish_reason=None),
    whole_choice=_message,
    chunk_choice=_delta,
)
"""Endpoint /v1/chat/completions."""
COMPLETIONS = Endpoint(
    name="completions",
    path="/v1/completions",
    body_type=CompletionBody,
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    whole_choice=_text,
    chunk_choice=_text,
)
"""Endpoint /v1/completions."""
BY_PATH = {each.path: each for each in (CHAT, COMPLETIONS)}
"""Path -> its endpoint."""
