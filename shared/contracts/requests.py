"""A request from its first byte to its final: ingress body, queued form, replies."""

from enum import Enum
from typing import Annotated, Any, Literal

from msgspec import Meta

from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    RunId,
    Seconds,
    TenantId,
    UnixTime,
    Value,
)
from shared.contracts.qos import Importance, Slo, SloVerdict

Tokens = tuple[int, ...]


class ModelRef(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What a wire `model` resolves to. The base decides residency; the rest rides on it."""

    name: str
    """As the producer wrote it; echoed in answers."""
    base: ModelName
    adapter: str | None = None
    revision: str | None = None


class ChatMessage(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, OpenAI-style."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """Text, or a list of `{"type": "text", "text": ...}` parts."""


class PromptText(Value, frozen=True, kw_only=True, omit_defaults=True):
    """How much text a prompt is, before it is tokenized."""

    num_bytes: int
    """In UTF-8."""
    num_messages: int = 0
    """Of a chat, each of which its template adds tokens to."""


class Sampling(Value, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when to stop. Defaults are OpenAI's."""

    max_tokens: Annotated[int, Meta(ge=1)] = 128
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    seed: int | None = None
    """Stamped at ingress when sampling is random, so that a replayed run repeats itself."""
    stop: tuple[str, ...] = ()
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    ignore_eos: bool = False


class ReplyMode(Enum):
    """What the producer wants on its reply queue."""

    STREAM = "stream"
    """`run.started`, tokens as they come, and the final."""
    FINAL = "final"
    """The final only; it is self-contained."""


class Progress(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What an evicted or crashed run had produced; travels with the request."""

    token_ids: Tokens = ()
    first_token_at: UnixTime | None = None
    late_tokens: int = 0
    max_tbt_s: Seconds | None = None


class Attempts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The request's way through the mesh so far."""

    hop: int = 0
    """Grows by one each time the request goes back to a queue; orders runs."""
    evictions: int = 0
    crashes: int = 0
    """Engine crashes that this request was running in. At two it is run alone."""
    relegated: bool = False
    evicted_by: InstanceId | None = None
    evicted_at: UnixTime | None = None


class WaitForecast(Value, frozen=True, kw_only=True):
    """How long a request was expected to wait for its turn, from `grouped_at` on."""

    mean_s: Annotated[Seconds, Meta(ge=0)]
    sd_s: Annotated[Seconds, Meta(ge=0)]


class QueuedRequest(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.queued.v1"
):
    """A validated, admitted request as it waits in lanes and companions."""

    request_id: RequestId
    model: ModelRef
    prompt: str | Tokens | None = None
    messages: tuple[ChatMessage, ...] | None = None
    """Either this or `prompt` is set."""
    prompt_tokens: int
    """Exact when the prompt is token ids, else the ingress's estimate."""
    sampling: Sampling
    slo: Slo
    arrived_at: UnixTime
    grouped_at: UnixTime
    tenant: TenantId
    application: str = "default"
    importance: Importance = Importance.HIGH
    priority: int = 0
    """Higher first; negative may be shed. Breaks ties between equal deadlines only."""
    lane: str
    """Queue name of its lane; companions lead back to it."""
    reply_to: str | None = None
    reply_mode: ReplyMode = ReplyMode.STREAM
    traceparent: str | None = None
    progress: Progress = Progress()
    attempts: Attempts = Attempts()
    prefix: tuple[int, ...] = ()
    """Chained hashes of the prompt's first parts, where it was routed by them; see
    `solver.routing.prefix_hashes`."""
    foretold: WaitForecast | None = None
    """By the plan in force when it came; none where nothing is known of that."""

    @property
    def deadline_at(self) -> UnixTime:
        """The deadline that queueing is about; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)


class RunStarted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="run.started.v1"):
    """
    A run of the request begins; always before its tokens.

    Tokens before `offset` came from earlier runs and stay valid.
    """

    request_id: RequestId
    run_id: RunId
    hop: int = 0
    instance_id: InstanceId
    offset: int = 0
    at: UnixTime


class TokenChunk(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive tokens of one run; identity is (request, run, offset)."""

    request_id: RequestId
    run_id: RunId
    offset: int = 0
    """Index of the first token in the answer."""
    token_ids: Tokens
    text: str = ""
    """The text that these tokens complete; concatenation over a run is the answer."""


class TokensEmitted(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="tokens.emitted.v1"
):
    """One flush of an agent to one reply destination: chunks of many requests."""

    instance_id: InstanceId
    chunks: tuple[TokenChunk, ...]


class FinishReason(Enum):
    """Why a generation ended (OpenAI's words)."""

    STOP = "stop"
    LENGTH = "length"


class Usage(Value, frozen=True, kw_only=True):
    """Token counts of a finished request, always written in full."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class Timings(Value, frozen=True, kw_only=True, omit_defaults=True):
    """When the request passed each hop, Unix seconds."""

    arrived_at: UnixTime
    grouped_at: UnixTime
    pulled_at: UnixTime
    submitted_at: UnixTime
    first_token_at: UnixTime
    finished_at: UnixTime
    foretold: WaitForecast | None = None
    """Of the time from `grouped_at` to `submitted_at`, when it was grouped."""


class RequestCompleted(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.completed.v1"
):
    """
    The whole answer. Self-contained: whoever missed every token loses nothing.

    Any successful final completes the request, whichever run it is from.
    """

    request_id: RequestId
    run_id: RunId
    instance_id: InstanceId
    model: str
    token_ids: Tokens
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    verdict: SloVerdict
    attempts: Attempts = Attempts()
    engine: str


class ErrorInfo(Value, frozen=True, kw_only=True, omit_defaults=True):
    """OpenAI-style error."""

    message: str
    type: str = "invalid_request_error"
    code: str
    param: str | None = None
    status: int = 400
    retry_after_s: Seconds | None = None


class RequestFailed(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.failed.v1"
):
    """The request ends without an answer. Loses to any live run or successful final."""

    request_id: RequestId
    run_id: RunId | None = None
    """The run that failed; none when the request never ran."""
    error: ErrorInfo
    at: UnixTime


Reply = RunStarted | TokensEmitted | RequestCompleted | RequestFailed
Final = RequestCompleted | RequestFailed
