"""Messages of a call with two answers; golden files of other requests have none of its fields."""

import msgspec

from shared.contracts.ingress import CallRequest
from shared.contracts.qos import Slo, SloVerdict
from shared.contracts.requests import (
    ApiCall,
    ChildAnswer,
    FinishReason,
    ModelRef,
    Progress,
    QueuedRequest,
    ReplyMode,
    RequestCompleted,
    RunStarted,
    Sampling,
    Timings,
    TokenChunk,
    TokensEmitted,
    Usage,
)
from tests.contract.messages.examples.lanes import LANE

BODY = b'{"model":"tiny","prompt":"Hello","n":2}'

CALLS: dict[str, msgspec.Struct] = {
    "call.request": CallRequest(
        endpoint="/v1/completions",
        body=msgspec.Raw(BODY),
        id="r1",
        slo=Slo(ttlt_s=30.0),
        priority=3,
        reply=ReplyMode.STREAM,
    ),
    "request.queued.v1": QueuedRequest(
        request_id="r1",
        model=ModelRef(name="tiny", base="tiny"),
        prompt_tokens=2,
        sampling=Sampling(max_tokens=32, seed=7),
        slo=Slo(ttlt_s=30.0),
        arrived_at=1000.25,
        grouped_at=1000.5,
        tenant="acme",
        lane=LANE,
        reply_to="reply.acme.1",
        progress=Progress(
            first_token_at=1001.0,
            children=(
                Progress(token_ids=(1, 2)),
                Progress(token_ids=(3,), finish_reason=FinishReason.STOP),
            ),
        ),
        call=ApiCall(
            endpoint="/v1/completions", body=msgspec.Raw(BODY), num_answers=2, deltas=True
        ),
    ),
    "run.started.v1": RunStarted(
        request_id="r1", run_id="run1", hop=1, instance_id="i1", offset=2, offsets=(2, 1), at=1.0
    ),
    "tokens.emitted.v1": TokensEmitted(
        chunks=(TokenChunk(request_id="r1", run_id="run1", offset=1, token_ids=(4,), child=1),),
    ),
    "request.completed.v1": RequestCompleted(
        request_id="r1",
        run_id="run1",
        instance_id="i1",
        model="tiny",
        token_ids=(),
        text="",
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=2, completion_tokens=3, total_tokens=5),
        timings=Timings(
            arrived_at=1000.25,
            grouped_at=1000.5,
            pulled_at=1000.75,
            submitted_at=1001.0,
            first_token_at=1001.25,
            finished_at=1002.5,
        ),
        verdict=SloVerdict(attained=True, ttft_s=1.0, ttlt_s=2.25),
        engine="vllm-0.32.0",
        response=msgspec.Raw(b'{"id":"cmpl-1","choices":[]}'),
        children=(
            ChildAnswer(token_ids=(1, 2), text="ab", finish_reason=FinishReason.LENGTH),
            ChildAnswer(token_ids=(3,), finish_reason=FinishReason.STOP),
        ),
    ),
}
"""Name of a golden file -> its message."""
