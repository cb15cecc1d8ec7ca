"""One example of every message of `shared.contracts.requests`."""

from shared.contracts.base import Message, RunId
from shared.contracts.qos import Importance, Slo, SloVerdict
from shared.contracts.requests import (
    Attempts,
    ChatMessage,
    ErrorInfo,
    FinishReason,
    ModelRef,
    Progress,
    QueuedRequest,
    ReplyMode,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    Sampling,
    Timings,
    TokenChunk,
    TokensEmitted,
    Usage,
)
from tests.contract.messages.examples.lanes import LANE

EXAMPLES: tuple[Message, ...] = (
    QueuedRequest(
        request_id="r1",
        model=ModelRef(name="tiny:lora", base="tiny", adapter="lora", revision="2"),
        messages=(ChatMessage(role="user", content="Hello"),),
        prompt_tokens=5,
        sampling=Sampling(max_tokens=32, temperature=0.5, seed=7, stop=("\n",)),
        slo=Slo(ttft_s=0.5, tbt_s=0.05),
        arrived_at=1000.25,
        grouped_at=1000.5,
        tenant="acme",
        application="chat",
        importance=Importance.LOW,
        priority=3,
        lane=LANE,
        reply_to="reply.acme.1",
        reply_mode=ReplyMode.FINAL,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        progress=Progress(token_ids=(1, 2), first_token_at=1001.0, late_tokens=1, max_tbt_s=0.1),
        attempts=Attempts(
            hop=2, evictions=1, crashes=1, relegated=True, evicted_by="i1", evicted_at=1001.5
        ),
    ),
    RunStarted(request_id="r1", run_id="run1", hop=2, instance_id="i1", offset=2, at=1002.0),
    TokensEmitted(
        chunks=(
            TokenChunk(request_id="r1", run_id="run1", offset=2, token_ids=(3, 4), text="ab"),
            TokenChunk(request_id="r2", run_id=RunId("run2"), token_ids=(5,)),
        ),
    ),
    RequestCompleted(
        request_id="r1",
        run_id="run1",
        instance_id="i1",
        model="tiny:lora",
        token_ids=(1, 2, 3, 4),
        text="xyab",
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=5, completion_tokens=4, total_tokens=9, cached_tokens=2),
        timings=Timings(
            arrived_at=1000.25,
            grouped_at=1000.5,
            pulled_at=1000.75,
            submitted_at=1001.0,
            first_token_at=1001.25,
            finished_at=1002.5,
        ),
        verdict=SloVerdict(attained=False, ttft_s=1.0, ttlt_s=2.25, max_tbt_s=0.5, late_tokens=1),
        attempts=Attempts(hop=2),
        engine="vllm-0.32.0",
    ),
    RequestFailed(
        request_id="r1",
        run_id="run1",
        error=ErrorInfo(
            message="too busy",
            type="overloaded_error",
            code="over_capacity",
            param="model",
            status=503,
            retry_after_s=2.5,
        ),
        at=1002.5,
    ),
)
