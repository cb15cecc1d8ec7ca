"""Validation of ingress bodies, for the gateway and for groupers."""

from typing import Annotated

from msgspec import Meta, Struct

from shared.api.calls import MOST_OBJECTS, MOST_PARTS, call_size
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import MAX_TARGET_S, Importance, Slo
from shared.contracts.requests import PromptText, QueuedRequest, Sampling

PositiveCount = Annotated[int, Meta(ge=1)]
LeastSeconds = Annotated[float, Meta(ge=0, le=MAX_TARGET_S)]


class IngressLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the parameters of one request."""

    max_body_bytes: PositiveCount = 4 * 1024 * 1024
    default_max_tokens: PositiveCount = 128
    min_ttft_s: LeastSeconds = 0.01
    """Smallest TTFT target; a request with a lower target is refused as infeasible."""
    min_tbt_s: LeastSeconds = 0.001
    max_stop_chars: PositiveCount = 256
    max_answers: PositiveCount = 128
    """Largest number of answers of one call, which are generated on one instance."""


def check_body_size(body: bytes, limits: IngressLimits) -> None:
    """
    Check the size of a request body.

    Raises:
        ContractError: The body is too large (status 413).
    """
    if len(body) > limits.max_body_bytes:
        raise ContractError(
            f"body has {len(body)} bytes; the limit is {limits.max_body_bytes}",
            code="body_too_large",
            status=413,
        )


def check_prompt(body: InferenceRequest) -> None:
    """
    Check that *body* has one prompt that is not empty.

    Raises:
        ContractError: The prompt is missing, empty or given twice; the message names the field.
    """
    if (body.messages is None) == (body.prompt is None):
        raise ContractError("the request needs either messages or prompt", param="messages")
    if body.messages == () or body.prompt in ("", ()):
        param = "messages" if body.prompt is None else "prompt"
        raise ContractError(f"{param} is empty", param=param)
    _check_number(len(body.messages or ()), "parts", MOST_PARTS)
    contents = (each.content for each in body.messages or ())
    parts = sum(len(content) for content in contents if isinstance(content, list))
    _check_number(parts, "parts of contents", MOST_OBJECTS)


def _check_number(number: int, what: str, limit: int) -> None:
    if number > limit:
        raise ContractError(
            f"messages has {number} {what}; the limit is {limit}",
            code="too_many_parts",
            param="messages",
        )


def effective_slo(body: InferenceRequest, *, now: float, limits: IngressLimits) -> Slo:
    """
    Return the SLO that *body* requests.

    Raises:
        ContractError: The SLO is below the mesh's minimum, contradicts itself, or has already
            expired.
    """
    slo = body.slo or Slo()
    if body.deadline is not None:
        slo = Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, ttlt_s=slo.ttlt_s, deadline_at=body.deadline)
    if slo.deadline_at is not None:
        if not slo.deadline_at <= now + MAX_TARGET_S:
            raise ContractError(
                f"deadline is {slo.deadline_at:.12g}; it must be a Unix time in seconds, at most "
                f"{MAX_TARGET_S / 86400:g} days ahead",
                param="deadline",
            )
        if slo.deadline_at <= now:
            raise ContractError(
                f"deadline passed {now - slo.deadline_at:.3f} s before the request arrived",
                code="deadline_expired",
                param="deadline",
            )
    if slo.ttft_s is not None and slo.ttft_s < limits.min_ttft_s:
        raise _impossible("slo.ttft_s", slo.ttft_s, limits.min_ttft_s)
    if slo.tbt_s is not None:
        if slo.tbt_s < limits.min_tbt_s:
            raise _impossible("slo.tbt_s", slo.tbt_s, limits.min_tbt_s)
        if slo.ttft_s is None:
            raise ContractError("slo.tbt_s requires slo.ttft_s", param="slo.ttft_s")
    if slo.ttlt_s is not None and slo.ttlt_s < (slo.ttft_s or limits.min_ttft_s):
        raise _impossible("slo.ttlt_s", slo.ttlt_s, slo.ttft_s or limits.min_ttft_s)
    return slo


def _impossible(param: str, value: float, floor: float) -> ContractError:
    return ContractError(
        f"{param} is {value:g} s; it must be at least {floor:g} s",
        code="slo_impossible",
        param=param,
    )


def effective_sampling(
    body: InferenceRequest, *, entry: ModelEntry, prompt_tokens: int, limits: IngressLimits
) -> Sampling:
    """
    Sampling within the model's limits.

    A random request without a seed gets no seed here.

    Raises:
        ContractError: The prompt and the output exceed the model's length, or two fields contradict
            each other.
    """
    room = entry.max_model_len - prompt_tokens
    asked = body.max_completion_tokens or body.max_tokens
    if room < 1:
        raise ContractError(
            f"prompt has {prompt_tokens} tokens; {entry.name} allows {entry.max_model_len}, "
            "including at least one generated token",
            code="context_length_exceeded",
            param="messages" if body.prompt is None else "prompt",
        )
    if asked is not None and asked > room:
        raise ContractError(
            f"max_tokens is {asked}; after a prompt of {prompt_tokens} tokens, {entry.name} "
            f"can generate {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    max_tokens = asked or min(limits.default_max_tokens, room)
    if body.min_tokens > max_tokens:
        raise ContractError(
            f"min_tokens is {body.min_tokens}, more than max_tokens, which is {max_tokens}",
            param="min_tokens",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    if any(not text or len(text) > limits.max_stop_chars for text in stop):
        raise ContractError(
            f"stop strings must have 1 to {limits.max_stop_chars} characters", param="stop"
        )
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(stop),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=body.ignore_eos,
    )


def prompt_text(request: InferenceRequest | QueuedRequest) -> PromptText | None:
    """Size of the prompt text that must be tokenized; None for a prompt of token ids."""
    if isinstance(request, QueuedRequest) and request.call is not None:
        return call_size(request.call).text
    if isinstance(request.prompt, tuple):
        return None
    num_bytes = len((request.prompt or "").encode())
    messages = request.messages or ()
    for message in messages:
        parts = message.content if isinstance(message.content, list) else [message.content]
        num_bytes += sum(
            len(str(part.get("text", "") if isinstance(part, dict) else part or "").encode())
            for part in parts
        )
    return PromptText(num_bytes=num_bytes, num_messages=len(messages))


def effective_importance(body: InferenceRequest) -> Importance:
    """
    Importance of a request: `importance` if set, else OpenAI's `service_tier` (`flex` is low), else
    high.

    Raises:
        ContractError: The `service_tier` is unknown.
    """
    if body.importance is not None:
        return body.importance
    if body.service_tier in (None, "auto", "default", "priority"):
        return Importance.HIGH
    if body.service_tier == "flex":
        return Importance.LOW
    raise ContractError(
        f"service_tier {body.service_tier!r} is unknown: must be auto, default, flex or priority",
        param="service_tier",
    )
