"""OpenAI's request bodies as sent over HTTP, and the mesh's additional fields."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shared.api.sessions import SessionFields
from shared.api.unsupported import UnsupportedFields, refuse_unsupported
from shared.contracts.base import hinted
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest, Label, Priority, RequestedSlo
from shared.contracts.qos import Importance, OnLate, PositiveSeconds
from shared.contracts.requests import ChatMessage, Tokens

SAME_IN_INGRESS = (
    *("model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p"),
    *("top_k", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("ignore_eos", "service_tier", "importance", "application", "slo", "deadline"),
    *("expires_at", "ttl_s", "not_before", "on_late"),
)
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class Body(SessionFields, frozen=True, kw_only=True):
    """
    Fields of the bodies of both endpoints. Unknown fields are ignored; null equals a missing field.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[tuple[str, ...], Meta(max_length=16)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    service_tier: str | None = None
    priority: Priority | None = None
    """
    Priority of the request: lower values are served first, contrary to the header
    `x-headway-priority`.
    """

    slo: RequestedSlo | None = None
    """SLO of the request; `{}` means best effort."""
    deadline: float | None = None
    """Absolute deadline of the request's completion, Unix seconds."""
    importance: Importance | None = None
    application: Label | None = None
    expires_at: float | None = None
    """Time at which the request ends without an answer, Unix seconds."""
    ttl_s: PositiveSeconds | None = None
    """Time from the arrival, or from `not_before`, until the request ends without an answer."""
    not_before: float | None = None
    """Time until which the request is held, Unix seconds."""
    on_late: OnLate | None = None
    """What happens to the request at its deadline."""


class ChatBody(Body, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: tuple[ChatMessage, ...]

    @property
    def content(self) -> str | Tokens | tuple[ChatMessage, ...]:
        return self.messages


class CompletionBody(Body, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | tuple[int | str | Tokens, ...]

    @property
    def content(self) -> str | Tokens | tuple[ChatMessage, ...]:
        """
        The prompt of a request: text, token ids, or a list with exactly one text or token list.

        Raises:
            ContractError: The request has several prompts.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        ids = tuple(item for item in self.prompt if isinstance(item, int))
        if len(ids) == len(self.prompt):
            return ids
        only = self.prompt[0]
        if len(self.prompt) > 1 or isinstance(only, int):
            raise ContractError(
                "only one prompt per request is supported",
                code="unsupported_parameter",
                param="prompt",
            )
        return only


B = TypeVar("B", bound=Body)
_unsupported = msgspec.json.Decoder(UnsupportedFields)
_decoders: Mapping[type[Body], msgspec.json.Decoder[Any]] = {
    each: msgspec.json.Decoder(each) for each in (ChatBody, CompletionBody)
}
"""Made here, since threads decode (`shared.api.calls`)."""


def decode_body(raw: bytes, body_type: type[B]) -> B:
    """
    Decode the request body *raw*.

    Raises:
        ContractError: The body is not JSON, or a field is not supported or violates its schema;
            `param` names the field.
    """
    try:
        refuse_unsupported(_unsupported.decode(raw))
        body: B = _decoders[body_type].decode(raw)
        return body  # noqa: TRY300 - decoding is what fails
    except msgspec.ValidationError as error:
        text = str(error)
        message = _PATH.sub("", text) + hinted(text).removeprefix(text)
        raise ContractError(message, param=_field_at_fault(text)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _field_at_fault(text: str) -> str | None:
    """
    Path of the invalid field in msgspec's error text; if the field is missing, path of its object.
    """
    found = (pattern.search(text) for pattern in (_PATH, _MISSING))
    return ".".join(match[1] for match in found if match and match[1]) or None


def to_ingress(body: ChatBody | CompletionBody) -> InferenceRequest:
    """
    Convert *body* to the mesh's format, without tokenizing the prompt.

    Raises:
        ContractError: `stream_options` is set without `stream`.
    """
    if body.stream_options is not None and not body.stream:
        raise ContractError("stream_options requires stream", param="stream_options")
    fields: dict[str, Any] = {
        name: value for name in SAME_IN_INGRESS if (value := getattr(body, name)) is not None
    }
    if body.priority is not None:
        fields["priority"] = -body.priority
    fields["messages" if isinstance(body, ChatBody) else "prompt"] = body.content
    return InferenceRequest(**fields)
