"""Answers in OpenAI's shapes. Rendering only; who sends them is `exchange.py`."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.errors import error_body
from services.gateway.shapes import Shape
from shared.contracts.requests import ErrorInfo, RequestCompleted, Usage

SSE_DONE = b"data: [DONE]\n\n"


class Headway(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh's own part of an answer: where it was made and how it did against its SLO."""

    request_id: str
    instance: str
    engine: str
    slo_attained: bool
    ttft_s: float
    ttlt_s: float
    max_tbt_s: float | None
    late_tokens: int
    evictions: int
    relegated: bool

    @classmethod
    def of(cls, final: RequestCompleted) -> "Headway":
        """Seconds count from the request's arrival at the mesh."""
        arrived_at = final.timings.arrived_at
        return cls(
            request_id=final.request_id,
            instance=final.instance_id,
            engine=final.engine,
            slo_attained=final.verdict.attained,
            ttft_s=round(final.timings.first_token_at - arrived_at, 6),
            ttlt_s=round(final.timings.finished_at - arrived_at, 6),
            max_tbt_s=final.verdict.max_tbt_s,
            late_tokens=final.verdict.late_tokens,
            evictions=final.attempts.evictions,
            relegated=final.attempts.relegated,
        )


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's place for prefix hits."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        )


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: UsageBody | UnsetType | None = UNSET
    headway: Headway | UnsetType = UNSET


class Renderer:
    """
    Renders one request's answer.

    Args:
        shape: The endpoint's.
        request_id: The mesh's id; part of OpenAI's.
        model: As the client wrote it.
        created: Unix seconds.
        include_usage: `stream_options.include_usage`.
    """

    def __init__(
        self, shape: Shape, *, request_id: str, model: str, created: int, include_usage: bool
    ) -> None:
        self._shape = shape
        self._id = shape.id_prefix + request_id
        self._model = model
        self._created = created
        self._include_usage = include_usage

    def whole(self, final: RequestCompleted) -> bytes:
        """The JSON body of an answer that is not streamed."""
        choice = self._shape.whole_choice(final.text, final.finish_reason.value)
        return msgspec.json.encode(
            self._envelope(
                self._shape.whole,
                [choice],
                usage=UsageBody.of(final.usage),
                headway=Headway.of(final),
            )
        )

    def opening(self) -> bytes:
        """The event before any text; empty where the endpoint has none."""
        opening = self._shape.opening
        return b"" if opening is None else self._chunk([opening])

    def part(self, text: str) -> bytes:
        """The event of some new text."""
        return self._chunk([self._shape.chunk_choice(text, None)])

    def closing(self, final: RequestCompleted) -> bytes:
        """The last events: finish reason, usage if asked for, and [DONE]."""
        headway = Headway.of(final)
        choice = self._shape.chunk_choice("", final.finish_reason.value)
        events = self._chunk([choice], headway=headway)
        if self._include_usage:
            events += self._chunk([], usage=UsageBody.of(final.usage), headway=headway)
        return events + SSE_DONE

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: UsageBody | None = None,
        headway: Headway | UnsetType = UNSET,
    ) -> bytes:
        shown = usage if self._include_usage else UNSET
        return sse(
            msgspec.json.encode(
                self._envelope(self._shape.chunk, choices, usage=shown, headway=headway)
            )
        )

    def _envelope(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        *,
        usage: UsageBody | UnsetType | None,
        headway: Headway | UnsetType,
    ) -> Envelope:
        return Envelope(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            headway=headway,
        )


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def sse_error(info: ErrorInfo) -> bytes:
    """The event that ends a stream badly; no [DONE] follows it."""
    return sse(error_body(info))
