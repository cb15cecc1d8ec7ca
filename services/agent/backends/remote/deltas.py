"""What the events of a server's stream and its responses mean for an answer."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from shared.contracts.errors import ContractError, MeshError, NotActiveError
from shared.contracts.requests import FinishReason

_BUSY = (429, 503)
"""Statuses of servers that take no further request now."""
_REASONS = {
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "incomplete": FinishReason.LENGTH,
    "repetition": FinishReason.REPETITION,
}


class Lengths(Struct, frozen=True):
    """Numbers of tokens that a server has reported; 0: not reported."""

    prompt: int = 0
    completion: int = 0
    """Length of the answer so far."""
    cached: int = 0
    """Number of tokens of the prompt whose KV was cached."""


NO_LENGTHS = Lengths()


class Delta(Struct, frozen=True, kw_only=True):
    """One event of a stream, or a whole response."""

    text: str = ""
    num_tokens: int = 0
    """Number of tokens of the text; 1 if the server does not report it."""
    token_ids: tuple[int, ...] = ()
    """Ids of the tokens, if the server reports them."""
    finish_reason: FinishReason | None = None
    lengths: Lengths = NO_LENGTHS
    only_usage: bool = False
    """True for an event without any part of the answer."""


class _PromptDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    """Length of the prompt in the APIs `/v1/responses` and `/v1/messages`."""
    output_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def lengths(self) -> Lengths:
        details = self.prompt_tokens_details
        return Lengths(
            prompt=self.prompt_tokens or self.input_tokens or 0,
            completion=self.completion_tokens or self.output_tokens or 0,
            cached=(details.cached_tokens or 0) if details else 0,
        )


_NO_USAGE = _Usage()


_NONE = Raw(b"null")


class _Message(Struct, frozen=True):
    """A part of an answer in a stream, or a whole answer."""

    role: str | None = None
    """Set in whole answers, and in a stream's first event, which has no token."""
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_tokens(self) -> bool:
        """True also if the token's text is not complete yet."""
        parts = (self.content, self.reasoning, self.reasoning_content, self.tool_calls)
        return any(parts) or (self.content is not None and self.role is None)


_NO_MESSAGE = _Message()


class _Choice(Struct, frozen=True):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None


class _Chunk(Struct, frozen=True):
    """An event or a response of `/v1/chat/completions` and `/v1/completions`."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Raw = _NONE


class _Event(Struct, frozen=True):
    """An event or a response of `/v1/responses` and `/v1/messages`."""

    type: str | None = None
    delta: Any = None
    usage: _Usage | None = None
    response: Raw = _NONE
    message: Raw = _NONE
    error: Raw = _NONE
    status: str | None = None
    stop_reason: str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk)
_decode_event = msgspec.json.Decoder(_Event)


def _of_chunk(data: bytes) -> Delta:
    chunk = _decode_chunk.decode(data)
    if chunk.error != _NONE:
        raise refusal(500, data)
    texts: list[str] = []
    ids: list[int] = []
    num_tokens, reason = 0, None
    for choice in chunk.choices or ():
        part = choice.delta or choice.message or _NO_MESSAGE
        texts.append(choice.text or part.content or "")
        ids += choice.token_ids or ()
        has_tokens = choice.text is not None or part.has_tokens
        num_tokens += len(choice.token_ids or ()) or int(has_tokens)
        reason = choice.finish_reason or reason
    return Delta(
        text="".join(texts),
        num_tokens=num_tokens,
        token_ids=tuple(ids),
        finish_reason=_reason(reason),
        only_usage=not chunk.choices,
        lengths=NO_LENGTHS if chunk.usage is None else chunk.usage.lengths,
    )


_LAST_OF_RESPONSES = ("response.completed", "response.incomplete")


def _of_responses(data: bytes) -> Delta:
    event = _decode_event.decode(data)
    if event.error != _NONE or event.type in ("error", "response.failed"):
        raise refusal(500, data)
    if event.type in _LAST_OF_RESPONSES:
        return _of_responses(bytes(event.response))
    if event.type is None:  # a whole response
        usage = event.usage or _NO_USAGE
        return Delta(finish_reason=_reason(event.status or "stop"), lengths=usage.lengths)
    if not event.type.endswith(".delta") or not isinstance(event.delta, str):
        return Delta()
    is_text = event.type == "response.output_text.delta"
    return Delta(text=event.delta if is_text else "", num_tokens=int(bool(event.delta)))


def _of_messages(data: bytes) -> Delta:
    event = _decode_event.decode(data)
    if event.error != _NONE or event.type == "error":
        raise refusal(500, data)
    usage = event.usage or _NO_USAGE
    match event.type:
        case "message":
            return Delta(finish_reason=_reason(event.stop_reason or "stop"), lengths=usage.lengths)
        case "message_start":
            started = _decode_event.decode(event.message)
            return Delta(lengths=(started.usage or _NO_USAGE).lengths)
        case "content_block_delta" if isinstance(event.delta, dict):
            text = event.delta.get("text") or ""
            parts = (text, event.delta.get("thinking"), event.delta.get("partial_json"))
            return Delta(text=text, num_tokens=int(any(parts)))
        case "message_delta" if isinstance(event.delta, dict):
            return Delta(
                finish_reason=_reason(event.delta.get("stop_reason")), lengths=usage.lengths
            )
    return Delta()


READERS: Mapping[str, Callable[[bytes], Delta]] = {
    "/v1/chat/completions": _of_chunk,
    "/v1/completions": _of_chunk,
    "/v1/responses": _of_responses,
    "/v1/messages": _of_messages,
}
"""Endpoint -> reader of its events and responses, which raises the error of an event."""


def read(endpoint: str, data: bytes) -> Delta:
    """
    What *data*, an event of a stream or a response, means for the answer.

    Raises:
        MeshError: The data are an error, or no JSON of this endpoint.
    """
    if endpoint not in READERS:
        check_no_error(data)
        return Delta(finish_reason=FinishReason.STOP)  # it generates nothing
    try:
        return READERS[endpoint](data)
    except msgspec.DecodeError as error:
        raise ContractError(
            f"the server's answer cannot be read: {error}", code="server_error", status=502
        ) from error


class _WithError(Struct, frozen=True):
    error: Raw = _NONE


_decode_error = msgspec.json.Decoder(_WithError)


def check_no_error(text: bytes) -> None:
    """
    Check a part of a server's answer that need not be an event of a stream, nor JSON.

    Raises:
        MeshError: It is an error.
    """
    if not text.lstrip().startswith(b"{"):
        return
    try:
        found = _decode_error.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if found.error != _NONE:
        raise refusal(500, text)


def refusal(status: int, body: bytes) -> MeshError:
    """
    The error of a server's response.

    Another instance may serve a request that a busy server refuses.
    """
    message, param, code = _error_of(body)
    if status in _BUSY:
        return NotActiveError(f"the server takes no further request now: {message}")
    if status < 500:  # noqa: PLR2004 - errors of the client
        return ContractError(
            message,
            code=code or "invalid_request",
            param=param,
            status=status,
            response=body if _is_json(body) else None,
        )
    return ContractError(f"the server failed: {message}", code="server_error", status=502)


class _Error(Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(Struct, frozen=True):
    error: _Error | str | None = None
    detail: Any = None
    message: str | None = None


def _error_of(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, field and code of an error; servers differ in the form of their errors."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:500].decode(errors="replace") or "no message", None, None
    if isinstance(found.error, _Error):
        code = found.error.code
        return found.error.message, found.error.param, code if isinstance(code, str) else None
    text = found.error or found.message
    return text or str(found.detail or body[:500].decode(errors="replace")), None, None


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _reason(text: str | None) -> FinishReason | None:
    return None if text is None else _REASONS.get(text, FinishReason.STOP)
