"""What producers publish: an OpenAI-style body with the mesh's own fields beside it."""

from typing import Annotated, Any

from msgspec import Meta

from shared.contracts.base import Value
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ChatMessage, ReplyMode

Identifier = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Label = Annotated[str, Meta(min_length=1, max_length=128)]


class AskedSlo(Slo, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A producer's target: one that is misspelt would else be none at all."""


class AskedTargets(Value, frozen=True, kw_only=True):
    """As much of a body as its targets take."""

    slo: AskedSlo | None = None


class InferenceRequest(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Body of a message to `headway.requests`.

    Everything but `model` and one of `messages` and `prompt` has a default.
    Unknown fields are ignored, but for those inside `slo`; fields that are known but unsupported
    are refused.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | tuple[int, ...] | None = None

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[tuple[str, ...], Meta(max_length=16)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    ignore_eos: bool = False
    user: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None

    n: int = 1
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    best_of: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    id: Identifier | None = None
    """Request id, the same on every retry; the AMQP message id if absent."""
    slo: Slo | None = None
    deadline: float | None = None
    """Absolute completion deadline, Unix seconds; shorthand for `slo.deadline_at`."""
    tenant: Label | None = None
    """Believed only from trusted publishers; otherwise the authenticated user counts."""
    application: Label | None = None
    """Groups requests whose output lengths are alike, for the estimator."""
    importance: Importance | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Higher first; negative may be shed."""
    reply: ReplyMode | None = None
    arrived_at: float | None = None
    """When the request reached the mesh; believed only from trusted publishers."""
    prompt_tokens: int | None = None
    """Exact prompt length; stamped by trusted publishers only."""


class QueueItem(Value, frozen=True, kw_only=True, omit_defaults=True):
    """llm-d-async's message shape, accepted as it is."""

    id: Identifier
    payload: dict[str, Any]
    deadline: float | None = None
    created: float | None = None
    metadata: dict[str, str] | None = None
    headers: dict[str, str] | None = None
    endpoint: str | None = None
