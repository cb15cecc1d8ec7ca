"""What differs between the two endpoints' answers."""

from typing import Any, Protocol


class Shape(Protocol):
    """What differs between the two endpoints."""

    id_prefix: str
    whole: str
    chunk: str
    opening: dict[str, Any] | None
    """Choice of the chunk before any text, if there is one."""

    def whole_choice(self, text: str, reason: str) -> dict[str, Any]: ...
    def chunk_choice(self, text: str, reason: str | None) -> dict[str, Any]: ...


def _choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, **fields, "logprobs": None}


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    opening: dict[str, Any] | None = _choice(
        delta={"role": "assistant", "content": ""}, finish_reason=None
    )

    def whole_choice(self, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(message=message, finish_reason=reason)

    def chunk_choice(self, text: str, reason: str | None) -> dict[str, Any]:
        # OpenAI's last delta is empty. The others may have tokens without text yet.
        delta = {"content": text} if reason is None else {}
        return _choice(delta=delta, finish_reason=reason)


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    opening: dict[str, Any] | None = None

    def whole_choice(self, text: str, reason: str) -> dict[str, Any]:
        return _choice(text=text, finish_reason=reason)

    def chunk_choice(self, text: str, reason: str | None) -> dict[str, Any]:
        return _choice(text=text, finish_reason=reason)
