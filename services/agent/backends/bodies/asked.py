"""What a body asks for, for each endpoint; other fields of stock bodies have no effect."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.agent.backends.bodies.tools import Tool, chosen
from shared.api.calls import COMPLETION_TOKENS, COMPLETIONS
from shared.api.unsupported import UnsupportedFields, refuse_unsupported
from shared.contracts.errors import ContractError
from shared.contracts.requests import ChatMessage, Sampling, Tokens
from shared.models.tokenizer import Prompt

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MOST_ANSWERS = 128
_SUPPORTED = ("n", "tools", "tool_choice")
"""Fields that only other engines without vLLM refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answers that a body asks for."""

    model: str | None
    """Name of the model, as the client knows it."""
    prompts: tuple[Prompt, ...]
    num_answers: int = 1
    """Number of answers to each prompt."""
    max_tokens: int | None
    """Limit of each answer; None: the rest of the context."""
    sampling: Sampling
    """Other parameters of the answers."""
    tool: Tool | None = None
    """Tool that each answer calls."""
    includes_usage: bool = False
    """True if a stream of OpenAI's older APIs ends with the numbers of tokens."""


class _Sampled(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None


_Limit = Annotated[int, Meta(ge=1)] | None
_Stops = str | Annotated[tuple[str, ...], Meta(max_length=16)] | None
_Content = str | list[dict[str, Any]] | None


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: _Content = None
    tool_calls: list[Any] | None = None


class _Generated(_Sampled, frozen=True, kw_only=True):
    max_tokens: _Limit = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    stop: _Stops = None


class _Chat(_Generated, frozen=True, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: _Limit = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class _Completion(_Generated, frozen=True, kw_only=True):
    prompt: str | Annotated[list[int | str | Tokens], Meta(min_length=1)]


class _Responses(_Sampled, frozen=True, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Limit = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class _Messages(_Sampled, frozen=True, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: _Content = None
    stop_sequences: Annotated[tuple[str, ...], Meta(max_length=16)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


_chat, _completion = msgspec.json.Decoder(_Chat), msgspec.json.Decoder(_Completion)
_responses, _messages = msgspec.json.Decoder(_Responses), msgspec.json.Decoder(_Messages)
_unsupported = msgspec.json.Decoder(UnsupportedFields)
_options = msgspec.json.Decoder(_StreamOptions | None)
"""Made here, since threads decode (`shared.api.calls`)."""


def asked_of(endpoint: str, body: bytes, stream_options: bytes | None) -> Asked:
    """
    Read the body of a call.

    Args:
        endpoint: One of `ENDPOINTS`.
        stream_options: Options of the stream that the body has asked for.

    Raises:
        ContractError: The endpoint is not one of these, a field is not supported or is invalid;
            `param` names the field.
    """
    if endpoint not in ENDPOINTS:
        raise ContractError(
            f"this engine does not answer {endpoint[:80]}: must be one of {', '.join(ENDPOINTS)}",
            code="unsupported_parameter",
            param="endpoint",
        )
    try:
        asked = ENDPOINTS[endpoint](body)
        options = _options.decode(stream_options or b"null")
    except msgspec.ValidationError as error:
        raise ContractError(str(error), param=_field_of(str(error))) from error
    return replace(asked, includes_usage=options is not None and bool(options.include_usage))


def _of_chat(raw: bytes) -> Asked:
    refuse_unsupported(_unsupported.decode(raw), but=_SUPPORTED)
    body = _chat.decode(raw)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Asked(
        model=body.model,
        prompts=(_conversation(body.messages),),
        num_answers=body.n or 1,
        max_tokens=limit,
        sampling=_sampling(body, body.stop),
        tool=_openai_tool(body.tools, body.tool_choice),
    )


def _of_completion(raw: bytes) -> Asked:
    refuse_unsupported(_unsupported.decode(raw), but=_SUPPORTED)
    body = _completion.decode(raw)
    prompts = _prompts(body.prompt)
    if len(prompts) * (body.n or 1) > MOST_ANSWERS:
        raise ContractError(f"a request has at most {MOST_ANSWERS} answers", param="prompt")
    return Asked(
        model=body.model,
        prompts=prompts,
        num_answers=body.n or 1,
        max_tokens=body.max_tokens or COMPLETION_TOKENS,
        sampling=_sampling(body, body.stop),
    )


def _of_responses(raw: bytes) -> Asked:
    body = _responses.decode(raw)
    items = (
        body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input}]
    )
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    messages += [_turn_of_item(item) for item in items]
    return Asked(
        model=body.model,
        prompts=(tuple(messages),),
        max_tokens=body.max_output_tokens,
        sampling=_sampling(body, None),
        tool=_openai_tool(body.tools, body.tool_choice),
    )


def _of_messages(raw: bytes) -> Asked:
    body = _messages.decode(raw)
    system = [ChatMessage(role="system", content=_text_of(body.system))] if body.system else []
    choice = body.tool_choice or {}
    tool = None
    if choice.get("type") in ("any", "tool"):
        tools = [_tool(each, "input_schema") for each in body.tools or ()]
        name = choice.get("name") if choice["type"] == "tool" else None
        tool = chosen(tools, name=name, param="tool_choice")
    return Asked(
        model=body.model,
        prompts=((*system, *_conversation(body.messages)),),
        max_tokens=body.max_tokens,
        sampling=_sampling(body, body.stop_sequences),
        tool=tool,
    )


ENDPOINTS: Mapping[str, Callable[[bytes], Asked]] = {
    CHAT: _of_chat,
    COMPLETIONS: _of_completion,
    RESPONSES: _of_responses,
    MESSAGES: _of_messages,
}
"""Endpoint -> reader of its bodies."""


def _sampling(body: _Sampled, stop: _Stops) -> Sampling:
    return Sampling(
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else stop or (),
        ignore_eos=bool(body.ignore_eos),
    )


def _prompts(prompt: str | list[int | str | Tokens]) -> tuple[Prompt, ...]:
    """The prompts of a completion: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    ids = tuple(item for item in prompt if isinstance(item, int))
    if not ids:
        return tuple(item for item in prompt if not isinstance(item, int))
    if len(ids) < len(prompt):
        raise ContractError("prompt has both token ids and prompts", param="prompt")
    return (ids,)


def _conversation(messages: Iterable[_Message]) -> tuple[ChatMessage, ...]:
    return tuple(
        _turn(each.role, [*_parts(each.content), *_calls(each.tool_calls)]) for each in messages
    )


def _turn_of_item(item: Mapping[str, Any]) -> ChatMessage:
    """The message that an item of `/v1/responses` stands for."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return _turn("assistant", _calls([item]))
    if kind == "function_call_output":
        return _turn("tool", _parts(item.get("output")))
    return _turn(item.get("role"), _parts(item.get("content")))


def _turn(role: Any, parts: list[dict[str, Any]]) -> ChatMessage:
    try:
        return msgspec.convert({"role": role, "content": parts}, ChatMessage)
    except msgspec.ValidationError as error:
        raise ContractError(f"a message is invalid: {error}", param="messages") from error


def _parts(content: Any) -> list[dict[str, Any]]:
    """Parts of a message, those with text in the form of chats."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ContractError("content must be a text or a list of parts", param="messages")
    return [part for each in content for part in _part(each)]


def _part(part: Any) -> list[dict[str, Any]]:
    kind = part.get("type") if isinstance(part, dict) else None
    match kind:
        case "text" | "input_text" | "output_text":
            return [{"type": "text", "text": part.get("text")}]
        case "tool_use":
            return _calls([part])
        case "tool_result":
            return _parts(part.get("content"))
    return [part] if isinstance(part, dict) else [{"type": str(kind)}]


def _calls(calls: list[Any] | None) -> list[dict[str, Any]]:
    """Tool calls of earlier turns, as text."""
    return [{"type": "text", "text": msgspec.json.encode(call).decode()} for call in calls or ()]


def _text_of(content: _Content) -> str:
    texts = (part.get("text") for part in _parts(content))
    return "".join(text for text in texts if isinstance(text, str))


def _openai_tool(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> Tool | None:
    """The tool that `tool_choice` demands; None if the answer may have text."""
    if choice in (None, "auto", "none"):
        return None
    name = None
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
    elif choice != "required":
        raise ContractError("must be none, auto, required or a function", param="tool_choice")
    offered = [_tool(each.get("function", each), "parameters") for each in tools or ()]
    return chosen(offered, name=name, param="tool_choice")


def _tool(found: Any, schema: str) -> Tool:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        raise ContractError("each tool must have a name", param="tools")
    parameters = found.get(schema)
    return Tool(name, parameters if isinstance(parameters, dict) else {})


def _field_of(error: str) -> str | None:
    """The field that an error of msgspec names."""
    if "missing required field" in error:
        return error.partition("`")[2].partition("`")[0]
    return error.rpartition("`$.")[2].rstrip("`") if "`$." in error else None
