"""Bodies that producers publish: OpenAI-style, with additional fields of the mesh."""

from typing import Annotated, Any

from msgspec import Meta, Raw

from shared.contracts.base import Value
from shared.contracts.qos import Clamp, Importance, OnLate, PositiveSeconds, Slo
from shared.contracts.requests import ChatMessage, ReplyMode

IDEMPOTENT_HEADER = "x-headway-idempotent"
"""AMQP header, `true`: a message under an id that was published before is the same request."""
DIGEST_HEADER = "x-headway-digest"
"""AMQP header with the digest of what was asked; used only from trusted publishers."""
Identifier = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Label = Annotated[str, Meta(min_length=1, max_length=128)]
ModelLabel = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_PRIORITY = 1000
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class RequestedSlo(Slo, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Targets that a producer sets. Unknown fields are refused, so that a misspelt target is not
    ignored.
    """


class RequestedTargets(Value, frozen=True, kw_only=True):
    """Fields of a body from which targets are computed."""

    slo: RequestedSlo | None = None


class InferenceRequest(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Body of a message to `headway.requests`.

    `model` and one of `messages` and `prompt` are required; other fields have defaults. Unknown
    fields are ignored, except inside `slo`; the fields listed in `unsupported` are refused.
    """

    model: ModelLabel
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

    id: Identifier | None = None
    """Request id, the same on every retry; the default is the AMQP message id."""
    slo: Slo | None = None
    deadline: float | None = None
    """
    Absolute deadline of the request's completion, Unix seconds; short form of `slo.deadline_at`.
    """
    tenant: Label | None = None
    """
    Tenant of the request, if a trusted publisher sends it; otherwise the authenticated user is the
    tenant.
    """
    application: Label | None = None
    """Name of a group of requests with similar output lengths, for the estimator."""
    session: Label | None = None
    """Name of the agent's session or the chat that the request belongs to."""
    importance: Importance | None = None
    priority: Priority = 0
    """Priority: higher values are served first; requests with a negative value may be shed."""
    reply: ReplyMode | None = None
    arrived_at: float | None = None
    """Time at which the request reached the mesh; used only from trusted publishers."""
    prompt_tokens: int | None = None
    """Exact prompt length; set by trusted publishers only."""
    expires_at: float | None = None
    """Time at which the request ends without an answer, wherever it is, Unix seconds."""
    ttl_s: PositiveSeconds | None = None
    """Time from the arrival, or from `not_before`, until the request ends without an answer."""
    not_before: float | None = None
    """
    Time until which the request is held, Unix seconds. Targets that are relative to the arrival
    count from this time.
    """
    on_late: OnLate | None = None
    """What happens at the deadline; the default is the grouper's for the request's QoS class."""
    clamped: tuple[Clamp, ...] = ()
    """What the policy of the tenant did not grant; used only from trusted publishers."""


class CallRequest(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Body of a message to `headway.requests` in the form of HTTP.

    `body` may also contain `slo`, `deadline`, `importance`, `application`, `expires_at`, `ttl_s`,
    `not_before` and `on_late`, as over HTTP; the fields here have precedence.
    """

    endpoint: str
    """Path of the endpoint in vLLM's API; see `shared.api.calls.ALL_ENDPOINTS`."""
    body: Raw
    """Body for the endpoint, a JSON object."""
    events: bool = False
    """
    True: a streamed answer comes as the server-sent events of its endpoint, without texts and
    without a response beside them.
    """
    model: ModelLabel | None = None
    """Model of the request, if `body` names none."""

    id: Identifier | None = None
    """Request id, the same on every retry; the default is the AMQP message id."""
    slo: Slo | None = None
    deadline: float | None = None
    """
    Absolute deadline of the request's completion, Unix seconds; short form of `slo.deadline_at`.
    """
    tenant: Label | None = None
    """
    Tenant of the request, if a trusted publisher sends it; otherwise the authenticated user is the
    tenant.
    """
    application: Label | None = None
    """Name of a group of requests with similar output lengths, for the estimator."""
    session: Label | None = None
    """Name of the agent's session or the chat that the request belongs to."""
    importance: Importance | None = None
    priority: Priority | None = None
    """
    Priority: higher values are served first. The default is that of `body`, where lower values are
    served first, as in vLLM.
    """
    reply: ReplyMode | None = None
    """The default is `stream` if `body` asks for a stream, else `final`."""
    arrived_at: float | None = None
    """Time at which the request reached the mesh; used only from trusted publishers."""
    expires_at: float | None = None
    """Time at which the request ends without an answer, wherever it is, Unix seconds."""
    ttl_s: PositiveSeconds | None = None
    """Time from the arrival, or from `not_before`, until the request ends without an answer."""
    not_before: float | None = None
    """
    Time until which the request is held, Unix seconds. Targets that are relative to the arrival
    count from this time.
    """
    on_late: OnLate | None = None
    """What happens at the deadline; the default is the grouper's for the request's QoS class."""
    clamped: tuple[Clamp, ...] = ()
    """What the policy of the tenant did not grant; used only from trusted publishers."""


class QueueItem(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Message format of llm-d-async, accepted without changes."""

    id: Identifier
    payload: dict[str, Any]
    deadline: float | None = None
    created: float | None = None
    metadata: dict[str, str] | None = None
    headers: dict[str, str] | None = None
    endpoint: str | None = None
