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
    """Resolved wire `model`. The base decides residency; the adapter is served on top of it."""

    name: str
    """Name used by the producer; echoed in answers."""
    base: ModelName
    adapter: str | None = None
    revision: str | None = None


class ChatMessage(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, OpenAI-style."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """Text, or a list of `{"type": "text", "text": ...}` parts."""


class PromptText(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Size of a prompt's text before tokenization."""

    num_bytes: int
    """UTF-8 bytes."""
    num_messages: int = 0
    """Messages of a chat; the chat template adds tokens to each."""


class Sampling(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stop parameters. Defaults are OpenAI's."""

    max_tokens: Annotated[int, Meta(ge=1)] = 128
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    seed: int | None = None
    """Set at ingress when sampling is random, so that a replayed run gives the same tokens."""
    stop: tuple[str, ...] = ()
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    ignore_eos: bool = False


class ReplyMode(Enum):
    """Replies that the producer wants on its reply queue."""

    STREAM = "stream"
    """`run.started`, tokens as they come, and the final reply."""
    FINAL = "final"
    """Only the final reply, which contains the whole answer."""


class Progress(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Output of an evicted or crashed run; travels with the request."""

    token_ids: Tokens = ()
    first_token_at: UnixTime | None = None
    late_tokens: int = 0
    max_tbt_s: Seconds | None = None


class Attempts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """History of the request in the mesh."""

    hop: int = 0
    """Number of times that the request was requeued; puts its runs in order."""
    evictions: int = 0
    crashes: int = 0
    """
    Number of engine crashes while this request was running. From two on, the request is run alone.
    """
    relegated: bool = False
    evicted_by: InstanceId | None = None
    evicted_at: UnixTime | None = None


class WaitForecast(Value, frozen=True, kw_only=True):
    """Predicted time that a request waits for its turn, from `grouped_at` on."""

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
    """Exactly one of `messages` and `prompt` is set."""
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
    """
    Higher values first, but only among equal deadlines; requests with a negative value may be shed.
    """
    lane: str
    """Queue name of its lane; requests return to it from companion queues."""
    reply_to: str | None = None
    reply_mode: ReplyMode = ReplyMode.STREAM
    traceparent: str | None = None
    progress: Progress = Progress()
    attempts: Attempts = Attempts()
    prefix: tuple[int, ...] = ()
    """
    Chained hashes of the prompt's leading blocks, if it was routed by prefix; see
    `solver.routing.prefix_hashes`.
    """
    predicted_wait: WaitForecast | None = None
    """Forecast by the plan in force at grouping; None where no forecast was available."""

    @property
    def deadline_at(self) -> UnixTime:
        """Deadline that queueing is planned for; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)


class RunStarted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="run.started.v1"):
    """
    A run of the request begins; always precedes its tokens.

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
    """Text completed by these tokens; the texts of all chunks of a run, joined, are its answer."""


class TokensEmitted(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="tokens.emitted.v1"
):
    """One flush of an agent to one reply destination: chunks of many requests."""

    instance_id: InstanceId
    chunks: tuple[TokenChunk, ...]


class FinishReason(Enum):
    """Reason why a generation ended, in OpenAI's terms."""

    STOP = "stop"
    LENGTH = "length"


class Usage(Value, frozen=True, kw_only=True):
    """Token counts of a finished request, always written in full."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class Timings(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Time at which the request passed each stage, Unix seconds."""

    arrived_at: UnixTime
    grouped_at: UnixTime
    pulled_at: UnixTime
    submitted_at: UnixTime
    first_token_at: UnixTime
    finished_at: UnixTime
    predicted_wait: WaitForecast | None = None
    """Forecast made at grouping for the time from `grouped_at` to `submitted_at`."""


class RequestCompleted(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.completed.v1"
):
    """
    The whole answer. Self-contained: a consumer that missed every token batch loses nothing.

    Any successful final completes the request, from whichever run.
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
    """The request ends without an answer. A live run or a successful final overrides it."""

    request_id: RequestId
    run_id: RunId | None = None
    """The run that failed; None when the request never ran."""
    error: ErrorInfo
    at: UnixTime


Reply = RunStarted | TokensEmitted | RequestCompleted | RequestFailed
Final = RequestCompleted | RequestFailed
