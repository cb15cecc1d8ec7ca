"""A request in all its forms: ingress body, queued request, replies."""

from enum import Enum
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

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
from shared.contracts.qos import Clamp, Importance, OnLate, Slo, SloVerdict
from shared.contracts.tenants.policies import RateLimit

Tokens = tuple[int, ...]
UNKNOWN_TOKEN = -1
"""Stands for a token whose id the server does not report."""


class ModelRef(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Model of a request, resolved from its wire name.

    The base determines residency; the adapter is applied to the base.
    """

    name: str
    """Model name that the producer sent; answers repeat it."""
    base: ModelName
    adapter: str | None = None
    revision: str | None = None


class ChatMessage(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, OpenAI-style."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """Content of the message: text, or a list of `{"type": "text", "text": ...}` parts."""


class PromptText(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Size of a prompt's text before tokenization."""

    num_bytes: int
    """Size of the prompt's text in UTF-8 bytes."""
    num_messages: int = 0
    """Number of chat messages in the prompt; the chat template adds tokens to each message."""


class Sampling(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stop parameters, with OpenAI's defaults."""

    max_tokens: Annotated[int, Meta(ge=1)] = 128
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    seed: int | None = None
    """
    Random seed, set at ingress for random sampling, so that a replayed run gives the same tokens.
    """
    stop: tuple[str, ...] = ()
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    ignore_eos: bool = False


class ApiCall(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    A request in the form of HTTP. An engine host makes the prompts and the response from it.

    A call has several answers if its body has several prompts or asks for several answers.
    """

    endpoint: str
    """Path of the endpoint in vLLM's API."""
    body: Raw
    """Body for the endpoint, without the fields of the mesh; it is not streamed."""
    num_answers: int = 1
    deltas: bool = False
    """True if the chunks of the answers contain text."""
    events: bool = False
    """True if the chunks contain the server-sent events of the endpoint's stream."""
    stream_options: Raw | UnsetType = UNSET
    """Options of the stream, for servers that stream the answer themselves."""
    plain: bool = False
    """True if the producer sent a prompt or messages: the final then has text and no response."""
    pools: bool = False
    """True if a pooling model of the mesh makes the response: at once, without tokens."""


class ReplyMode(Enum):
    """Replies that the producer requests on its reply queue."""

    STREAM = "stream"
    """The message `run.started`, tokens as they are generated, and the final reply."""
    FINAL = "final"
    """Only the final reply, which contains the whole answer."""


class FinishReason(Enum):
    """Reason for which the generation of an answer ended, in vLLM's terms."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """The answer repeats itself, which the request asked the engine to detect."""


class StepDetails(Value, frozen=True, array_like=True):
    """What one step of an answer has beside its token ids."""

    num_tokens: int
    """Number of the answer's tokens that the step generated; 0 for the output of a pooled input."""
    parts: tuple[bytes, ...] = ()
    """Buffers of vLLM's encoder, for outputs with more than token ids."""
    events: bytes = b""
    """Server-sent events that the tokens of the step complete, if the answer streams events."""
    child: int = 0
    """Index of the answer, where steps of several answers are in one list."""


class Progress(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Output of an evicted or crashed run, which is stored in the request."""

    token_ids: Tokens = ()
    first_token_at: UnixTime | None = None
    late_tokens: int = 0
    max_tbt_s: Seconds | None = None
    details: tuple[StepDetails, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in `children` only, for an answer that is complete."""
    cached_tokens: int = 0
    """Number of tokens of the prompt whose KV the first run found."""
    digest: bytes = b""
    """
    Digest of the events of all tokens, chained by `shared.api.digests.chained`: an engine makes
    equal events of the tokens, or cannot continue the stream. Empty without events.
    """
    children: tuple["Progress", ...] = ()
    """Progress of each answer of a call, in the response's order; then `token_ids` is empty."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers."""
        return len(self.token_ids) + sum(len(child.token_ids) for child in self.children)


def steps_of(progress: Progress) -> list[Tokens]:
    """The tokens of an answer in the steps of its details; tokens without details are one step."""
    steps, position = [], 0
    for step in progress.details:
        if step.num_tokens:
            steps.append(progress.token_ids[position : position + step.num_tokens])
            position += step.num_tokens
    rest = progress.token_ids[position:]
    return [*steps, rest] if rest else steps


class Attempts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """History of the request in the mesh."""

    hop: int = 0
    """Number of times that the request was requeued; its runs are ordered by this number."""
    evictions: int = 0
    crashes: int = 0
    """
    Number of engine crashes during runs of this request. From two crashes on, the request runs
    alone.
    """
    breaks: int = 0
    """
    Number of runs in a row at servers of others whose connections broke before a new token.
    """
    repeated: bool = False
    """
    True once the broker has delivered the request again: an earlier run may have sent events of
    which nothing is known.
    """
    relegated: bool = False
    evicted_by: InstanceId | None = None
    evicted_at: UnixTime | None = None


class HistoryEntry(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One unplanned step of a request between its queue and its answer."""

    at: UnixTime
    instance_id: InstanceId
    what: str
    """`evicted`, `swapped out`, `resumed`, `handed back`, `relegated`, `passed on`, ..."""
    why: str = ""
    pulled_at: UnixTime | None = None
    """Time at which the instance pulled the request; None from agents of older versions."""
    begun_at: UnixTime | None = None
    """Begin of the run or activation that the step ended; None if there was none."""


MAX_HISTORY = 16
"""Number of entries of a request's history; if there are more, the oldest but one are dropped."""


class WaitForecast(Value, frozen=True, kw_only=True):
    """Predicted time from `grouped_at` until the request is served."""

    mean_s: Annotated[Seconds, Meta(ge=0)]
    sd_s: Annotated[Seconds, Meta(ge=0)]


class StoredWork(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    The store keeps the final of the request: agents and groupers send it to the store's queue too.
    """

    digest: str
    """Digest of what was asked: another digest under the same id is refused."""
    kept_s: Seconds
    """Time for which the final is kept."""
    claimed: bool = False
    """True once a grouper has decided that this message is the first one under its id."""


class QueuedRequest(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.queued.v1"
):
    """A validated and admitted request in a lane or companion queue."""

    request_id: RequestId
    model: ModelRef
    prompt: str | Tokens | None = None
    messages: tuple[ChatMessage, ...] | None = None
    """Chat messages of the prompt; exactly one of `messages`, `prompt` and `call` is set."""
    prompt_tokens: int
    """
    Length of all prompts: exact if they are token ids or an engine host has rendered them, else
    estimated at ingress.
    """
    sampling: Sampling
    """Parameters of the answer; of a call, only the seed and the limit of all its answers."""
    slo: Slo
    arrived_at: UnixTime
    grouped_at: UnixTime
    tenant: TenantId
    application: str = "default"
    session: str | None = None
    """Name of the agent's session or the chat; its prompts begin alike."""
    importance: Importance = Importance.HIGH
    priority: int = 0
    """
    Priority of the request among equal deadlines, higher first; with a negative value it may be
    shed.
    """
    lane: str
    """Queue name of the request's lane, to which it returns from companion queues."""
    reply_to: str | None = None
    reply_mode: ReplyMode = ReplyMode.STREAM
    traceparent: str | None = None
    progress: Progress = Progress()
    attempts: Attempts = Attempts()
    prefix: tuple[int, ...] = ()
    """
    Chained hashes of the prompt's leading blocks, if the request was routed by prefix; see
    `solver.routing.prefix_hashes`.
    """
    predicted_wait: WaitForecast | None = None
    """Wait that the plan in force predicted at grouping; None if there was no forecast."""
    expected_tokens: int | None = None
    """
    Expected length of the answer, a high quantile that is at most `sampling.max_tokens`; None in
    messages of older versions.
    """
    call: ApiCall | None = None

    history: tuple[HistoryEntry, ...] = ()
    """What happened to the request beyond a pull, a run and an answer, oldest first."""
    expires_at: UnixTime | None = None
    """Time at which the request ends, wherever it is; None: never. See `shared.contracts.ends`."""
    on_late: OnLate = OnLate.SERVE
    clamped: tuple[Clamp, ...] = ()
    """What the producer asked for and its tenant's policy does not grant."""
    stored: StoredWork | None = None
    """Set if the id is claimed in the store; None: the store does not know the request."""
    tracestate: str | None = None
    """Second header of the trace context, which `traceparent` begins."""

    @property
    def num_answers(self) -> int:
        return 1 if self.call is None else self.call.num_answers

    @property
    def pools(self) -> bool:
        """True if the model pools: the answer has no tokens and comes at once."""
        return self.call is not None and self.call.pools

    @property
    def answer_tokens(self) -> int:
        """Expected length of the answer in tokens; the limit if nothing was predicted."""
        limit = self.sampling.max_tokens
        return limit if self.expected_tokens is None else min(limit, self.expected_tokens)

    @property
    def deadline_at(self) -> UnixTime:
        """Deadline of the request that planning uses; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)


class RunStarted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="run.started.v1"):
    """
    A run of the request begins; this message precedes the run's tokens.

    Tokens before `offset` came from earlier runs and remain valid.
    """

    request_id: RequestId
    run_id: RunId
    hop: int = 0
    instance_id: InstanceId
    offset: int = 0
    at: UnixTime
    offsets: tuple[int, ...] = ()
    """Offset of each answer, if earlier runs of a call have begun several answers."""

    def offset_of(self, child: int) -> int:
        """Index of the first token that the run adds to an answer."""
        offsets = self.offsets or (self.offset,)
        return offsets[child] if child < len(offsets) else 0


class TokenChunk(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive tokens of one run, identified by (request, run, offset)."""

    request_id: RequestId
    run_id: RunId
    offset: int = 0
    """Index in the answer of the chunk's first token."""
    token_ids: Tokens
    text: str = ""
    """
    Text that the chunk's tokens complete; the joined texts of a run's chunks are the run's text.
    """
    details: tuple[StepDetails, ...] = ()
    """Details of all of `token_ids`, by step, if the request asks for more than tokens."""
    child: int = 0
    """Index of the answer, if a call has several."""


class TokensEmitted(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="tokens.emitted.v1"
):
    """One flush of an agent to one reply queue: chunks of several requests."""

    chunks: tuple[TokenChunk, ...]


class Usage(Value, frozen=True, kw_only=True):
    """Token counts of a finished request; all fields are always written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class Timings(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Times at which the request passed each stage, Unix seconds."""

    arrived_at: UnixTime
    grouped_at: UnixTime
    pulled_at: UnixTime
    submitted_at: UnixTime
    first_token_at: UnixTime
    finished_at: UnixTime
    predicted_wait: WaitForecast | None = None
    """Forecast, made at grouping, of the time from `grouped_at` to `submitted_at`."""


class ChildAnswer(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a call."""

    token_ids: Tokens
    text: str = ""
    """Text of the tokens, if the chunks contain text; the response has the parsed answer."""
    finish_reason: FinishReason


class RequestCompleted(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.completed.v1"
):
    """
    Final reply with the whole answer; complete even for a consumer that missed all tokens.

    A successful final reply of any run completes the request.
    """

    request_id: RequestId
    run_id: RunId
    instance_id: InstanceId
    model: str
    token_ids: Tokens
    """All tokens; those of a server that reports no ids are `UNKNOWN_TOKEN`."""
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    verdict: SloVerdict
    attempts: Attempts = Attempts()
    history: tuple[HistoryEntry, ...] = ()
    engine: str
    details: tuple[StepDetails, ...] = ()
    """
    Details of all tokens, e.g. log probabilities, or the output of each pooled input; empty if the
    request asks for none.
    """
    response: Raw | UnsetType = UNSET
    """
    Response of the call's endpoint; then `token_ids` and `text` are empty, and `details` are the
    events of the stream, those of earlier runs included. Null if vLLM's application has streamed
    events.
    """
    children: tuple[ChildAnswer, ...] = ()
    """All answers of a call, in the order of the response."""
    clamped: tuple[Clamp, ...] = ()
    """What the producer asked for and its tenant's policy did not grant."""


class ErrorInfo(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Error in OpenAI's format."""

    message: str
    type: str = "invalid_request_error"
    code: str
    param: str | None = None
    status: int = 400
    retry_after_s: Seconds | None = None
    response: Raw | UnsetType = UNSET
    """Response of a server of others that refused the request, as it came."""
    requests_limit: RateLimit | None = None
    """State of the tenant's limit of requests per minute, if the error is about a limit."""
    tokens_limit: RateLimit | None = None


class RequestFailed(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.failed.v1"
):
    """
    Final reply of a failed run, without an answer.

    A live run or a successful final reply overrides this reply.
    """

    request_id: RequestId
    run_id: RunId | None = None
    """Id of the run that failed; None if the request never ran."""
    error: ErrorInfo
    at: UnixTime
    history: tuple[HistoryEntry, ...] = ()


Reply = RunStarted | TokensEmitted | RequestCompleted | RequestFailed
Final = RequestCompleted | RequestFailed
