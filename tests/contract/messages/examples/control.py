"""One example of every message of `shared.contracts.control`."""

from shared.contracts.base import Message
from shared.contracts.control import (
    DrainInstance,
    EvictRequest,
    LaneNonempty,
    LsoActivate,
    LsoAnswered,
    LsoCheckpoint,
    LsoClear,
    LsoOutcome,
    LsoPreempt,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
    RequestCancel,
    RunStop,
    SnapshotRequested,
    StopReason,
)
from tests.contract.messages.examples.lanes import LANE

EXAMPLES: tuple[Message, ...] = (
    RunStop(request_id="r1", run_id="run1", reason=StopReason.DUPLICATE),
    RequestCancel(request_id="r1", reply_to="reply.p1"),
    LaneNonempty(queue=LANE),
    DrainInstance(instance_id="i1", exit=True),
    EvictRequest(instance_id="i1", request_id="r1"),
    LsoPull(instance_id="i1", count=4, command_id="c1", reply_to="answer.1"),
    LsoSwapOut(instance_id="i1", request_id="r1", rest_s=2.5, command_id="c1", reply_to="answer.1"),
    LsoSwapIn(instance_id="i1", request_id="r1", command_id="c1", reply_to="answer.1"),
    LsoCheckpoint(instance_id="i1", request_id="r1", command_id="c1", reply_to="answer.1"),
    LsoClear(instance_id="i1", command_id="c1", reply_to="answer.1"),
    LsoWarm(instance_id="i1", model="tiny", command_id="c1", reply_to="answer.1"),
    LsoActivate(instance_id="i1", model="tiny", command_id="c1", reply_to="answer.1"),
    LsoPreempt(instance_id="i1", command_id="c1", reply_to="answer.1"),
    LsoSet(
        instance_id="i1",
        token_budget=256,
        max_running=8,
        command_id="c1",
        reply_to="answer.1",
    ),
    LsoAnswered(
        instance_id="i1",
        command_id="c1",
        lso="swap_out",
        outcome=LsoOutcome.REFUSED,
        message="r1 does not run: it waits in the window",
        duration_s=0.25,
        num_bytes=4096,
        at=1000.5,
    ),
    SnapshotRequested(reply_to="snapshot.1", at=1000.5),
)
