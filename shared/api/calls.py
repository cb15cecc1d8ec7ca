"""
Rules for calls, which are requests in the form of HTTP: an endpoint of vLLM's API and a body.

Only an engine host makes prompts of a body; until then, the body's text determines sizes.
"""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shared.api.sessions import SESSION_ARGUMENTS, SessionFields
from shared.contracts.base import hinted
from shared.contracts.errors import ContractError
from shared.contracts.ingress import Label, ModelLabel, Priority, RequestedSlo
from shared.contracts.qos import Importance, OnLate, PositiveSeconds
from shared.contracts.requests import ApiCall, PromptText, Tokens

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Endpoints of vLLM's API that generate answers."""
EMBEDDINGS = "/v1/embeddings"
COUNTERS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Endpoints that count or list tokens, and generate none."""
POOLERS = (
    *(EMBEDDINGS, "/v2/embed", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
"""Endpoints of models that pool."""
MOST_TOKEN_BYTES = 256
"""More bytes than a token of a known model has: the longest ones have 128 spaces."""
ALL_ENDPOINTS = (*ENDPOINTS, *COUNTERS, *POOLERS)
"""Endpoints of calls, which engines with vLLM's application and servers of others answer."""
OWN_FIELDS = (
    *("slo", "deadline", "importance", "application"),
    *("expires_at", "ttl_s", "not_before", "on_late"),
)
"""Fields of the mesh in bodies, which no application and no server reads."""
REFUSED_FIELDS = (
    *("kv_transfer_params", "ec_transfer_params", "use_beam_search"),
    *("data_parallel_rank", "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs"),
    *("prompt_embeds", "mm_processor_kwargs", "media_io_kwargs"),
)
"""Fields of vLLM's bodies that would control the engine, or that engines of the mesh lack."""
IGNORED_FIELDS = SessionFields.__struct_fields__
"""Fields that no application and no server reads, since they only name a session."""
GRAMMAR_FIELDS = ("structured_outputs", "response_format", "tools", "text", "output_config")
"""Fields of which vLLM makes grammars."""
MOST_PARTS = 4096
"""Largest number of messages or prompts of a request, which are objects in each program."""
MOST_OBJECTS = 2 * MOST_PARTS
"""Largest number of objects in a field with messages: messages, parts of their content, calls."""
MAX_GRAMMAR_BYTES = 128 << 10
"""Maximum size of each of these fields: making a grammar takes time where it is made."""

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
COMPLETION_TOKENS = 16
"""vLLM's limit of a completion that sets none; answers of other endpoints may fill the context."""
_TEXTS = ("content", "text", "arguments", "input", "output", "thinking")
"""Fields of messages whose text becomes a part of the prompt."""
_TRUNCATION = ("truncate_prompt_tokens", "truncation")
_NULL = Raw(b"null")
CallFields = Mapping[str, Raw]
"""Fields of a body, whose values are not decoded, so that they remain as they are."""


class CallBody(SessionFields, frozen=True, kw_only=True):
    """Fields of a body that the mesh reads; vLLM's application reads the other fields."""

    model: ModelLabel
    stream: bool | None = None
    priority: Priority | None = None
    """As in vLLM, lower values are served first."""
    service_tier: str | None = None
    slo: RequestedSlo | None = None
    deadline: float | None = None
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


def check_endpoint(endpoint: str, supported: Sequence[str] = ALL_ENDPOINTS) -> None:
    """
    Check that *endpoint* is supported.

    Raises:
        ContractError: It is not; the message names the endpoints that are.
    """
    if endpoint not in supported:
        raise ContractError(
            f"endpoint {endpoint[:80]!r} is not supported: must be one of {', '.join(supported)}",
            code="unsupported_parameter",
            param="endpoint",
        )


def call_fields(body: bytes) -> dict[str, Raw]:
    """
    The fields of a body.

    Raises:
        ContractError: The body is not a JSON object in UTF-8, or has a field that would control the
            engine, is too large or has the wrong type.
    """
    try:
        body = body.removeprefix(BOM_UTF8)
        body.decode()  # values stay as they are, so that decoding fields does not check their text
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(
            f"the body must be a JSON object: {error}", code="invalid_json"
        ) from error
    for name in REFUSED_FIELDS:
        # False and empty values ask for nothing.
        if name in fields and msgspec.json.decode(fields[name]):
            raise ContractError(
                f"{name} is not supported", code="unsupported_parameter", param=name
            )
    _check_xargs(fields.get("vllm_xargs", Raw(b"null")))
    grammar = bytes(fields.get("structured_outputs", b"null"))
    if not grammar.startswith((b"{", b"null")):
        # vLLM's application would fail with status 500.
        raise ContractError("structured_outputs must be an object", param="structured_outputs")
    for name in ("messages", "prompt", "input", "system"):
        check_parts(name, fields.get(name, Raw(b"")))
    for name in GRAMMAR_FIELDS:
        if name in fields and len(bytes(fields[name])) > MAX_GRAMMAR_BYTES:
            raise ContractError(
                f"{name} is too large: the limit is {MAX_GRAMMAR_BYTES} bytes", param=name
            )
    return fields


def _check_xargs(value: Raw) -> None:
    asked = msgspec.json.decode(value)
    others = asked.keys() - set(SESSION_ARGUMENTS) if isinstance(asked, dict) else {"vllm_xargs"}
    if asked and others:
        name = min(others)
        param = name if name == "vllm_xargs" else f"vllm_xargs.{name}"
        raise ContractError(
            f"{param} is not supported", code="unsupported_parameter", param=param[:128]
        )


def check_parts(name: str, value: Raw) -> None:
    """
    Check the number of messages or prompts in the field *name*; token ids are no parts.

    Raises:
        ContractError: There are more than `MOST_PARTS`, or more than `MOST_OBJECTS` objects in all.
    """
    text = bytes(value)
    if len(text) < 2 * MOST_PARTS or not text.lstrip().startswith(b"["):
        return  # fewer, with their commas
    parts = _parts.decode(text)
    if len(parts) > MOST_PARTS and not bytes(parts[0]).lstrip(b"-").isdigit():
        raise ContractError(
            f"{name} has {len(parts)} parts; the limit is {MOST_PARTS}",
            code="too_many_parts",
            param=name,
        )
    if text.count(b"{") > MOST_OBJECTS and (number := _num_objects(text)) > MOST_OBJECTS:
        raise ContractError(
            f"{name} has {number} objects, e.g. messages and parts of their content; the limit is "
            f"{MOST_OBJECTS}",
            code="too_many_parts",
            param=name,
        )


def truncates(fields: CallFields) -> bool:
    """True if a prompt may be longer than the context, since the body asks to cut it."""
    values = (bytes(fields.get(name, _NULL)) for name in _TRUNCATION)
    return any(value not in (b"null", b'"disabled"') for value in values)


def check_text(name: str, value: Raw | None, most_chars: float) -> None:
    """
    Check the length of the field *name*, if it is a text.

    Raises:
        ContractError: It has more than *most_chars* characters.
    """
    raw = b"" if value is None else bytes(value)
    if len(raw) <= most_chars or not raw.lstrip().startswith(b'"'):
        return
    num_chars = _num_chars(raw)
    if num_chars > most_chars:
        raise ContractError(
            f"{name} has {num_chars} characters: at most {most_chars:.0f} fit into the model's "
            "context",
            code="context_length_exceeded",
            param=name,
        )


def _num_chars(raw: bytes) -> int:
    """Number of characters of a JSON string; 0 if it is invalid, which the application reports."""
    try:
        return len(_text.decode(raw))
    except msgspec.DecodeError:
        return 0


def _num_objects(text: bytes) -> int:
    """
    Number of JSON objects in *text*, nested ones included; 0 if it is invalid, which the
    application reports.
    """
    try:
        number, left = 0, [msgspec.json.decode(text)]
    except msgspec.DecodeError:
        return 0
    while left:
        value = left.pop()
        if isinstance(value, dict):
            number += 1
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return number


def call_body(fields: CallFields) -> CallBody:
    """
    The fields that the mesh reads.

    Raises:
        ContractError: A field of the mesh has the wrong type; the message names it.
    """
    known = {name: value for name, value in fields.items() if name in CallBody.__struct_fields__}
    try:
        return _body.decode(msgspec.json.encode(known))
    except msgspec.ValidationError as error:
        text = str(error)
        param = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else "model"
        raise ContractError(hinted(text), param=param) from error


def stream_options(fields: CallFields) -> Raw | UnsetType:
    """Options of the stream that the body asks for."""
    return fields.get("stream_options", UNSET)


def forwarded(fields: CallFields) -> Raw:
    """The body for vLLM's application: without the fields of the mesh, and not streamed."""
    dropped = {"priority", *OWN_FIELDS, *IGNORED_FIELDS}
    if bytes(fields.get("stream", b"")) == b"true":
        dropped |= {"stream", "stream_options"}
    kept = {name: value for name, value in fields.items() if name not in dropped}
    return Raw(msgspec.json.encode(kept))


class _Sized(msgspec.Struct, frozen=True):
    """Fields that determine sizes. vLLM's application refuses invalid ones."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    system: Any = None
    tools: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


_body, _sized = msgspec.json.Decoder(CallBody), msgspec.json.Decoder(_Sized)
_parts = msgspec.json.Decoder(list[Raw])
_text = msgspec.json.Decoder(str)
"""
Made here, since threads decode: msgspec examines a type at its first use, and two threads that use
a type for the first time at once crash the process.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSize:
    """Sizes of a call."""

    text: PromptText | None
    """Text of all prompts; None if they are token ids."""
    prompt_tokens: int
    """Number of token ids of all prompts."""
    num_prompts: int
    """Number of prompts, or of inputs of a pooling model."""
    num_answers: int
    max_tokens: int | None
    """Limit of each answer; None: the rest of the context."""


def call_size(call: ApiCall) -> CallSize:
    """The sizes that the body of *call* states; fields that are invalid count as missing."""
    body = _sized.decode(call.body)
    if call.endpoint == EMBEDDINGS:
        return _size_of_inputs(_inputs(body))
    prompts = _prompts(body.prompt)
    texts = [each for each in prompts if isinstance(each, str)]
    messages = [
        *_items(body.system),
        *_items(body.instructions),
        *_items(body.messages),
        *_items(body.input),
    ]
    num_bytes = sum(_num_bytes(each) for each in (*texts, *messages))
    num_bytes += len(msgspec.json.encode(body.tools)) if body.tools else 0
    ids = [each for each in prompts if isinstance(each, list)]
    default = COMPLETION_TOKENS if call.endpoint == COMPLETIONS else None
    limits = (body.max_completion_tokens, body.max_tokens, body.max_output_tokens)
    return CallSize(
        text=PromptText(num_bytes=num_bytes, num_messages=len(messages)) if num_bytes else None,
        prompt_tokens=sum(map(len, ids)),
        num_prompts=max(1, len(prompts)),
        num_answers=max(1, len(prompts)) * (_positive(body.n) or 1),
        max_tokens=next((limit for limit in map(_positive, limits) if limit), default),
    )


def _size_of_inputs(inputs: list[Any]) -> CallSize:
    """Sizes of a call to a pooling model, which has one answer for all inputs."""
    num_bytes = sum(map(_num_bytes, inputs))
    parts = [part for each in inputs if isinstance(each, list) for part in each]
    num_messages = sum(isinstance(part, dict) for part in parts)
    return CallSize(
        text=PromptText(num_bytes=num_bytes, num_messages=num_messages) if num_bytes else None,
        prompt_tokens=sum(isinstance(part, int) for part in parts),
        num_prompts=max(1, len(inputs)),
        num_answers=1,
        max_tokens=None,
    )


def _inputs(body: _Sized) -> list[Any]:
    """The inputs of a pooling model: texts, lists of token ids, or conversations."""
    inputs = body.input if body.messages is None else body.messages
    if not isinstance(inputs, list):
        return [] if inputs is None else [inputs]
    is_single = all(isinstance(each, int | dict) for each in inputs)
    return [inputs] if is_single else inputs


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a completion: texts, or lists of token ids."""
    if not isinstance(prompt, list):
        return [] if prompt is None else [prompt]
    return [prompt] if all(isinstance(each, int) for each in prompt) else prompt


def _items(messages: Any) -> list[Any]:
    if messages is None:
        return []
    return messages if isinstance(messages, list) else [messages]


def _num_bytes(part: Any) -> int:
    """Size of the text in a message or in a part of one."""
    if isinstance(part, str):
        return len(part.encode())
    if isinstance(part, list):
        return sum(map(_num_bytes, part))
    if isinstance(part, dict):
        return sum(_num_bytes(part[name]) for name in _TEXTS if name in part)
    return 0


def prompt_of(call: ApiCall) -> str | Tokens:
    """
    The first prompt of a call, as far as its body states it: token ids, or a text with equal
    beginnings for bodies whose prompts begin alike. The chat template is not applied.
    """
    body = _sized.decode(call.body)
    if prompts := _prompts(body.prompt):
        first = prompts[0]
        is_ids = isinstance(first, list) and all(isinstance(each, int) for each in first)
        return tuple(first) if is_ids else _text_of(first)
    parts = [*_items(body.system), *_items(body.instructions)]
    parts += [*_items(body.messages), *_items(body.input)]
    tools = msgspec.json.encode(body.tools).decode() if body.tools else ""
    return tools + "".join(f"{_role_of(each)}\0{_text_of(each)}\0" for each in parts)


def _role_of(message: Any) -> Any:
    return message.get("role", "") if isinstance(message, dict) else ""


def _text_of(part: Any) -> str:
    """The text in a message or in a part of one."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(_text_of, part))
    if isinstance(part, dict):
        return "".join(_text_of(part[name]) for name in _TEXTS if name in part)
    return ""


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
