"""Renders answers in OpenAI's formats; `exchange.py` sends them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.gateway.errors import error_body
from services.gateway.shapes import Choice, Endpoint
from shared.contracts.requests import ErrorInfo, RequestCompleted, Usage

SSE_DONE = b"data: [DONE]\n\n"
SIMULATED_ENGINE = "simulated"
"""Name of the engine whose answers are random text."""
_FINGERPRINT = re.compile(rb'"system_fingerprint":(?:null|"[^"]*")')
"""The field as vLLM writes it; in a text, its quotes would be escaped."""
_NOTHING: Mapping[str, Any] = {}


def headway_of(final: RequestCompleted) -> dict[str, Any]:
    """
    Fields that the mesh adds to an answer: serving instance and SLO results.

    TTFT and TTLT are in seconds from the request's arrival at the mesh.
    """
    timings, verdict, attempts = final.timings, final.verdict, final.attempts
    return {
        "request_id": final.request_id,
        "instance": final.instance_id,
        "engine": final.engine,
        "slo_attained": verdict.attained,
        "ttft_s": round(timings.first_token_at - timings.arrived_at, 6),
        "ttlt_s": round(timings.finished_at - timings.arrived_at, 6),
        "max_tbt_s": None if verdict.max_tbt_s is None else round(verdict.max_tbt_s, 6),
        "late_tokens": verdict.late_tokens,
        "evictions": attempts.evictions,
        "hops": attempts.hop,
        "relegated": attempts.relegated,
    } | {
        name: msgspec.to_builtins(value)
        for name, value in (("history", final.history), ("clamped", final.clamped))
        if value
    }


def fingerprint_of(engine: str) -> str:
    """OpenAI's `system_fingerprint` of an answer by this kind of engine."""
    return f"headway-{engine}"


SIMULATED = fingerprint_of(SIMULATED_ENGINE)


def with_headway(body: bytes, finals: Sequence[RequestCompleted]) -> bytes:
    """
    A JSON object with the mesh's results: one, or a list if the call had several requests. If a
    simulated engine has answered, the fingerprint says so.
    """
    if any(final.engine == SIMULATED_ENGINE for final in finals):
        body = _FINGERPRINT.sub(f'"system_fingerprint":"{SIMULATED}"'.encode(), body, count=1)
    results = [headway_of(final) for final in finals]
    encoded = msgspec.json.encode(results[0] if len(results) == 1 else results)
    return body[:-1] + b',"headway":' + encoded + b"}"


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`, including its field for prefix-cache hits."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Renderer:
    """
    Renders the answer of one request.

    Args:
        endpoint: Endpoint of the request, which determines the formats.
        request_id: Id of the request in the mesh; OpenAI's id contains it.
        model: Model name of a streamed answer, as the client sent it.
        created: Creation time of a streamed answer, Unix seconds. A whole answer has the model and
            the arrival of its final, so that every repeat has the same body.
        include_usage: `stream_options.include_usage`.
    """

    def __init__(
        self, endpoint: Endpoint, *, request_id: str, model: str, created: int, include_usage: bool
    ) -> None:
        self._endpoint = endpoint
        self._include_usage = include_usage
        self._start = {
            "id": endpoint.id_prefix + request_id,
            "object": endpoint.chunk,
            "created": created,
            "model": model,
        }
        # If the client requested usage, all chunks but the last contain a null `usage`.
        self._usage = {"usage": None} if include_usage else {}

    def whole(self, final: RequestCompleted) -> bytes:
        """JSON body of an answer that is sent as one body."""
        choice = self._endpoint.whole_choice(final.text, final.finish_reason.value)
        parts = {"choices": [choice], "usage": usage_of(final.usage), "headway": headway_of(final)}
        own = {
            "object": self._endpoint.whole,
            "created": int(final.timings.arrived_at),
            "model": final.model,
            "system_fingerprint": fingerprint_of(final.engine),
        }
        return msgspec.json.encode(self._start | own | parts)

    def opening(self) -> bytes:
        """Event that precedes the text of a streamed answer; empty if the endpoint has none."""
        opening = self._endpoint.opening
        return b"" if opening is None else self._chunk([opening])

    def part(self, text: str) -> bytes:
        """Event with the next text of a streamed answer."""
        return self._chunk([self._endpoint.chunk_choice(text, None)])

    def closing(self, final: RequestCompleted) -> bytes:
        """Last events of a streamed answer: finish reason, usage if requested, and [DONE]."""
        extra = {
            "system_fingerprint": fingerprint_of(final.engine),
            "headway": headway_of(final),
        }
        choice = self._endpoint.chunk_choice("", final.finish_reason.value)
        events = self._chunk([choice], extra)
        if self._include_usage:
            events += self._chunk([], {"usage": usage_of(final.usage)} | extra)
        return events + SSE_DONE

    def _chunk(self, choices: list[Choice], extra: Mapping[str, Any] = _NOTHING) -> bytes:
        return sse(msgspec.json.encode({**self._start, "choices": choices, **self._usage, **extra}))


def sse(data: bytes) -> bytes:
    """Format one server-sent event."""
    return b"data: " + data + b"\n\n"


def sse_error(info: ErrorInfo) -> bytes:
    """Event that ends a stream with an error; the event [DONE] does not follow."""
    return sse(error_body(info))
