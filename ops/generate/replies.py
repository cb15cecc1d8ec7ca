"""Replies of runs, with defaults for irrelevant fields: for the cases and for tests."""

from collections.abc import Sequence

from shared.contracts.base import InstanceId, RequestId, RunId
from shared.contracts.qos import SloVerdict
from shared.contracts.requests import (
    ErrorInfo,
    FinishReason,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    Timings,
    TokenChunk,
    TokensEmitted,
    Usage,
)

REQUEST = RequestId("r1")
ANSWER = tuple(range(100, 112))


def text_of(token_ids: Sequence[int]) -> str:
    """Text of tokens; its length is independent of their number, and some tokens have no text."""
    return "".join("ab"[token % 2] * (token % 3) + f"{token}." for token in token_ids if token % 5)


def started(
    run: str,
    *,
    hop: int = 0,
    offset: int = 0,
    request: str = REQUEST,
    instance: str | None = None,
    at: float = 0.0,
) -> RunStarted:
    return RunStarted(
        request_id=RequestId(request),
        run_id=RunId(run),
        hop=hop,
        instance_id=InstanceId(instance or f"instance-of-{run}"),
        offset=offset,
        at=at,
    )


def chunk(
    run: str, start: int, end: int, *, answer: Sequence[int] = ANSWER, request: str = REQUEST
) -> TokenChunk:
    return TokenChunk(
        request_id=RequestId(request),
        run_id=RunId(run),
        offset=start,
        token_ids=tuple(answer[start:end]),
        text=text_of(answer[start:end]),
    )


def tokens(run: str, start: int, end: int, *, answer: Sequence[int] = ANSWER) -> TokensEmitted:
    return TokensEmitted(
        chunks=(chunk(run, start, end, answer=answer),),
    )


def completed(
    run: str, *, answer: Sequence[int] = ANSWER, request: str = REQUEST
) -> RequestCompleted:
    return RequestCompleted(
        request_id=RequestId(request),
        run_id=RunId(run),
        instance_id=InstanceId(f"instance-of-{run}"),
        model="m",
        token_ids=tuple(answer),
        text=text_of(answer),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=1, completion_tokens=len(answer), total_tokens=1 + len(answer)),
        timings=Timings(
            arrived_at=0.0,
            grouped_at=0.0,
            pulled_at=0.0,
            submitted_at=0.0,
            first_token_at=0.5,
            finished_at=1.0,
        ),
        verdict=SloVerdict(attained=True),
        engine="test",
    )


def failed(run: str | None = None, *, request: str = REQUEST) -> RequestFailed:
    return RequestFailed(
        request_id=RequestId(request),
        run_id=None if run is None else RunId(run),
        error=ErrorInfo(message="no", code="no", status=500),
        at=0.0,
    )
