"""
One example of every message; `python -m tests.contract.golden_messages` writes missing files.

A golden file is never overwritten: other bytes for the same message break running peers.
"""

from pathlib import Path

from shared.contracts.base import Message, RunId, encode, tag_of
from shared.contracts.control import (
    DrainInstance,
    EvictRequest,
    LaneNonempty,
    RequestCancel,
    RunStop,
    SnapshotRequested,
    StopReason,
)
from shared.contracts.estimates import (
    AlarmKind,
    AlarmRaised,
    LatencyCoefficients,
    Moments,
    Profile,
)
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import LaneQuota, PlanPublished, Segment, VirtualQueue
from shared.contracts.qos import Importance, QosClass, Slo, SloVerdict
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
from shared.contracts.telemetry import (
    InstanceStatus,
    InstanceTotals,
    Iteration,
    IterationsObserved,
    LanesObserved,
    LaneTotal,
    LeaderTick,
    ModelActivated,
    ModelState,
    RequestObserved,
    Residency,
)

GOLDEN = Path(__file__).parent / "golden"
LANE = "lane.1.tiny.high.3.short"

EXAMPLES: tuple[Message, ...] = (
    RunStop(request_id="r1", run_id="run1", reason=StopReason.DUPLICATE),
    RequestCancel(request_id="r1", reply_to="reply.p1"),
    LaneNonempty(queue=LANE),
    DrainInstance(instance_id="i1", exit=True),
    EvictRequest(instance_id="i1", request_id="r1"),
    SnapshotRequested(reply_to="snapshot.1", at=1000.5),
    LaneLayout(version=2, first_band_s=0.25, band_ratio=2.0, num_bands=10, work_edge_tokens=512),
    Profile(
        model="tiny",
        engine="vllm-0.32.0",
        device="cpu",
        version=7,
        at=1000.5,
        latency=LatencyCoefficients(constant_s=0.004, linear_s=0.0001, cross_s=1e-8),
        latency_error=0.05,
        num_iterations=300,
        token_rate_per_s=220.5,
        prefill_s=Moments(mean=0.2, sd=0.05, count=40),
        output_tokens={"*": Moments(mean=64.0, sd=20.0, count=40)},
        swap_s={"warm": 0.5, "cold": 3.25},
    ),
    AlarmRaised(alarm=AlarmKind.SLO_AT_RISK, lane=LANE, instance_id="i1", at=1000.5, detail="late"),
    PlanPublished(
        epoch=12,
        issued_at=1000.5,
        leader_id="planner-1",
        queue=VirtualQueue(
            instance_id="i1",
            segments=(
                Segment(
                    model="tiny",
                    lanes=(LaneQuota(lane=LANE, quota=16, token_share=0.75),),
                    best_effort_share=0.1,
                ),
            ),
        ),
        policy="qlm",
        expected_late=1.5,
        solve_s=0.25,
    ),
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
        instance_id="i1",
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
    InstanceStatus(
        instance_id="i1",
        incarnation="inc1",
        seq=9,
        at=1000.5,
        engine="vllm-0.32.0",
        device="cpu",
        model="tiny",
        models=(ModelState(model="tiny", residency=Residency.ACTIVE, activate_s=0.5),),
        plan_epoch=12,
        running=2,
        waiting=3,
        max_running=8,
        backlog_tokens=900,
        backlog_s=1.5,
        kv_utilization=0.25,
        kv_capacity_tokens=4096,
        draining=True,
        totals=InstanceTotals(pulled=10, completed=8, output_tokens=512),
        pulled_by_lane={LANE: 10},
        capabilities=("scheduling",),
    ),
    LanesObserved(
        sender="grouper-1",
        incarnation="inc1",
        seq=4,
        at=1000.5,
        layout=1,
        lanes=(
            LaneTotal(
                lane=LANE,
                requests=32,
                prompt_tokens=4096,
                max_tokens=1024,
                recent_enqueued_at=(999.5, 1000.25),
            ),
        ),
        admitted=32,
        refused=1,
    ),
    LeaderTick(sender="planner-1", at=1000.5),
    IterationsObserved(
        instance_id="i1",
        model="tiny",
        engine="vllm-0.32.0",
        device="cpu",
        at=1000.5,
        iterations=(
            Iteration(compute_tokens=64, context_tokens=128, num_decodes=4, duration_s=0.0125),
        ),
    ),
    RequestObserved(
        request_id="r1",
        instance_id="i1",
        model="tiny",
        engine="vllm-0.32.0",
        device="cpu",
        application="chat",
        tenant="acme",
        qos_class=QosClass.INTERACTIVE,
        prompt_tokens=5,
        output_tokens=4,
        arrived_at=1000.25,
        pulled_at=1000.75,
        submitted_at=1001.0,
        first_token_at=1001.25,
        finished_at=1002.5,
        attained=True,
        evictions=1,
        cached_tokens=2,
    ),
    ModelActivated(
        instance_id="i1", model="tiny", source=Residency.WARM, duration_s=0.5, at=1000.5
    ),
)


def golden_file(message: Message) -> Path:
    return GOLDEN / f"{tag_of(type(message))}.json"


if __name__ == "__main__":
    for example in EXAMPLES:
        if not golden_file(example).exists():
            golden_file(example).write_bytes(encode(example))
