"""Reads calls, whose prompts only an engine host makes."""

from dataclasses import dataclass
from typing import Any

import msgspec

from shared.api.calls import (
    COMPLETIONS,
    COUNTERS,
    MOST_TOKEN_BYTES,
    POOLERS,
    CallSize,
    call_body,
    call_fields,
    call_size,
    check_endpoint,
    forwarded,
    stream_options,
    truncates,
)
from shared.api.pooling import check_call_inputs, check_call_task
from shared.api.ranges import check_ranges
from shared.api.unsupported import WITHOUT_EFFECT
from shared.contracts.base import Decoder
from shared.contracts.checks import IngressLimits
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest, Identifier, InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import ApiCall, ReplyMode, Sampling

_OF_BODY = sorted(
    {*InferenceRequest.__struct_fields__, *WITHOUT_EFFECT} - {*CallRequest.__struct_fields__}
)
"""Fields that a call has inside its body only."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its producer published it."""

    body: InferenceRequest
    """The request; of a call, the fields of the mesh."""
    call: ApiCall | None = None
    size: CallSize | None = None


_PLAIN = (
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos"),
)
"""Fields of a plain request that are parts of a body."""
_Beside = msgspec.defstruct("_Beside", [(name, Any, msgspec.UNSET) for name in _OF_BODY])
_decode_beside: Decoder[msgspec.Struct] = Decoder(_Beside)


def refuse_beside_body(message: bytes) -> None:
    """
    Check that a call has the fields of its endpoint inside `body`.

    Raises:
        ContractError: It has one beside; the message names the field.
    """
    beside = _decode_beside(message)
    for name in _OF_BODY:
        if getattr(beside, name) is not msgspec.UNSET:
            raise ContractError(
                f"{name} must be inside body, since the request has an endpoint", param=name
            )


class _CallItem(msgspec.Struct, frozen=True):
    """A message of llm-d-async whose payload is the body for its endpoint."""

    id: Identifier
    payload: msgspec.Raw
    endpoint: str
    deadline: float | None = None


_decode_item: Decoder[_CallItem] = Decoder(_CallItem)


def call_of_item(message: bytes) -> CallRequest:
    """
    The call in a message of llm-d-async.

    Raises:
        ContractError: The message has no id, or a field has the wrong type.
    """
    item = _decode_item(message)
    return CallRequest(
        endpoint=item.endpoint, body=item.payload, id=item.id, deadline=item.deadline
    )


def asked_call(request: CallRequest, limits: IngressLimits) -> Asked:
    """
    The call that a producer published.

    Raises:
        ContractError: The endpoint or a field of the mesh is invalid, or there are too many
            answers. vLLM's application checks the other fields of the body.
    """
    check_endpoint(request.endpoint)
    fields = call_fields(bytes(request.body))
    if request.model is not None:
        fields.setdefault("model", msgspec.Raw(msgspec.json.encode(request.model)))
    body = call_body(fields)
    is_streamed = bool(body.stream)
    call = ApiCall(
        endpoint=request.endpoint,
        body=forwarded(fields),
        deltas=is_streamed and not request.events,
        events=is_streamed and request.events,
        stream_options=stream_options(fields) if is_streamed else msgspec.UNSET,
    )
    size = call_size(call)
    if size.num_answers > limits.max_answers:
        raise ContractError(
            f"the body asks for {size.num_answers} answers; the limit is {limits.max_answers}",
            param="n" if size.num_prompts <= limits.max_answers else "prompt",
        )
    of_mesh = InferenceRequest(
        model=body.model,
        id=request.id,
        slo=_slo(request, body.slo),
        deadline=request.deadline if request.deadline is not None else body.deadline,
        tenant=request.tenant,
        application=request.application or body.application,
        session=request.session or body.session,
        importance=request.importance or body.importance,
        service_tier=body.service_tier,
        priority=-(body.priority or 0) if request.priority is None else request.priority,
        reply=request.reply or (ReplyMode.STREAM if is_streamed else ReplyMode.FINAL),
        arrived_at=request.arrived_at,
        expires_at=_first(request.expires_at, body.expires_at),
        ttl_s=_first(request.ttl_s, body.ttl_s),
        not_before=_first(request.not_before, body.not_before),
        on_late=request.on_late or body.on_late,
        clamped=request.clamped,
    )
    return Asked(of_mesh, msgspec.structs.replace(call, num_answers=size.num_answers), size)


def served_call(call: ApiCall, size: CallSize, entry: ModelEntry) -> ApiCall:
    """
    The call for an engine of the mesh with the model *entry*.

    Raises:
        ContractError: The model does not perform the task of the endpoint, a field is out of its
            range, the texts cannot fit into its context, or a pooling model cannot answer the body
            in one message.
    """
    check_call_task(call.endpoint, entry)
    check_ranges(call.endpoint, call_fields(bytes(call.body)))
    _check_length(call, size, entry)
    if call.endpoint in POOLERS:
        check_call_inputs(call, size.num_prompts)
    elif call.endpoint not in COUNTERS:
        return call
    return msgspec.structs.replace(call, pools=True)


def _check_length(call: ApiCall, size: CallSize, entry: ModelEntry) -> None:
    most = entry.max_model_len * MOST_TOKEN_BYTES * size.num_prompts
    num_bytes = 0 if size.text is None else size.text.num_bytes
    if num_bytes > most and not truncates(call_fields(bytes(call.body))):
        raise ContractError(
            f"the texts of the body have {num_bytes} bytes: {entry.name} has a context of "
            f"{entry.max_model_len} tokens",
            code="context_length_exceeded",
            param="body",
        )


def plain_call(body: InferenceRequest, limits: IngressLimits) -> Asked:
    """
    The call that asks a server for the answer to a prompt or to messages.

    It has only the parameters that differ from OpenAI's defaults, since servers of other makes
    refuse or ignore the others.
    """
    values = msgspec.to_builtins(body)
    fields = {name: values[name] for name in _PLAIN if name in values}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    fields.setdefault("max_tokens", limits.default_max_tokens)
    is_chat = body.messages is not None
    call = ApiCall(
        endpoint="/v1/chat/completions" if is_chat else COMPLETIONS,
        body=msgspec.Raw(msgspec.json.encode(fields)),
        deltas=body.reply is not ReplyMode.FINAL,
        plain=True,
    )
    return Asked(body, call, call_size(call))


def _first(beside: float | None, of_body: float | None) -> float | None:
    return of_body if beside is None else beside


def _slo(request: CallRequest, of_body: Slo | None) -> Slo | None:
    return of_body if request.slo is None else request.slo


def call_sampling(size: CallSize, *, entry: ModelEntry, prompt_tokens: int) -> Sampling:
    """The limit of all answers of a call; an engine host has the other parameters."""
    room = max(1, entry.max_model_len - prompt_tokens // size.num_prompts)
    return Sampling(max_tokens=size.num_answers * min(room, size.max_tokens or room))


def with_model(body: msgspec.Raw, model: str) -> msgspec.Raw:
    """The body of a call for *model*, which the name in the body was resolved to."""
    fields = {**call_fields(bytes(body)), "model": msgspec.Raw(msgspec.json.encode(model))}
    return msgspec.Raw(msgspec.json.encode(fields))
