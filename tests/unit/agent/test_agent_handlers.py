"""Handling of each message by the agent."""

import pytest

from services.agent.aborting import end_run
from services.agent.state import Ending
from shared.broker import topology
from shared.broker.protocol import Settlement
from shared.contracts.base import Decoder, InstanceId, RequestId, RunId
from shared.contracts.control import (
    DrainInstance,
    EvictRequest,
    LaneNonempty,
    RequestCancel,
    RunStop,
    SnapshotRequested,
    StopReason,
)
from shared.contracts.estimates import Profile
from shared.contracts.telemetry import InstanceStatus
from tests.brokers import eventually
from tests.deliveries import LooseDelivery
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import REPLY, AgentRig, listen

pytestmark = pytest.mark.virtual_time

LANE, RESUME = lane_of().queue_name, lane_of().resume_name
I1, R = InstanceId("i1"), RequestId("r")
decode_status: Decoder[InstanceStatus] = Decoder(InstanceStatus)


async def test_plan_is_stored(rig: AgentRig):
    await rig.deliver(a_plan(OTHER, epoch=3))
    assert rig.state.plan == a_plan(OTHER, epoch=3)


async def test_a_notice_wakes_a_source(rig: AgentRig):
    rig.sources(LANE)
    rig.state.order.empty(LANE, rig.clock.now())
    rig.state.pull_wake.clear()
    await rig.deliver(LaneNonempty(queue=LANE, source="grouper", put=1))
    assert rig.state.pull_wake.is_set()
    assert rig.state.order.next(rig.clock.now(), best_effort_room=False) is not None


async def test_queue_in_creation_is_not_polled(rig: AgentRig):
    """RabbitMQ closes a connection that polls a queue whose process has not started."""
    rig.sources(LANE)
    rig.state.order.empty(LANE, rig.clock.now())
    rig.state.pull_wake.clear()
    await rig.deliver(LaneNonempty(queue=LANE))
    assert not rig.state.pull_wake.is_set()


@pytest.mark.parametrize("queue", ["relegated", "lane.x", "resume.1.tiny-llama.x"])
async def test_invalid_notice_is_ignored(rig: AgentRig, queue: str):
    delivery = await rig.deliver(LaneNonempty(queue=queue, source="grouper", put=1))
    assert delivery.settlements == [Settlement.REJECT]


async def test_newest_profile_of_this_kind_of_engine_is_kept(rig: AgentRig):
    def profile(version: int, engine: str = "scripted") -> Profile:
        return Profile(model=MODEL, engine=engine, device="paper", version=version, at=0.0)

    for each in (profile(2), profile(3), profile(1), profile(9, "other")):
        await rig.deliver(each)
    assert rig.state.profiles == {MODEL: profile(3)}


async def test_stopped_run_is_only_acknowledged(rig: AgentRig):
    run, task = await rig.running(a_request("r", reply_to=REPLY))
    await rig.replies()
    await rig.deliver(RunStop(request_id=R, run_id=run.run_id, reason=StopReason.DUPLICATE))
    await task
    assert await rig.replies() == []
    assert await rig.far.ready(RESUME) == 0
    assert await rig.back_in_lane(LANE) == 0


async def test_stop_of_another_run_is_ignored(rig: AgentRig):
    run, task = await rig.running(a_request("r"))
    await rig.deliver(RunStop(request_id=R, run_id=RunId("other"), reason=StopReason.DUPLICATE))
    assert run.ending is None
    await rig.engine.abort(R)
    await task


async def test_running_request_is_cancelled(rig: AgentRig):
    _, task = await rig.running(a_request("r", reply_to=REPLY))
    await rig.deliver(RequestCancel(request_id=R, reply_to=REPLY))
    await task
    assert (await rig.failed()).error.code == "cancelled"
    assert await rig.back_in_lane(LANE) == 0


async def test_waiting_request_is_cancelled(rig: AgentRig):
    await rig.hold(a_request("r", reply_to=REPLY))
    await rig.deliver(RequestCancel(request_id=R, reply_to=REPLY))
    assert (await rig.failed()).error.code == "cancelled"
    assert len(rig.state.window) == 0
    assert await rig.back_in_lane(LANE) == 0


async def test_cancel_reaches_the_copy_of_an_ending_run(rig: AgentRig):
    """The broker redelivered the request to this agent before it confirmed the publish."""
    request = a_request("r", reply_to=REPLY)
    run, task = await rig.running(request)
    rig.broker.down.add(topology.LANES)
    end_run(rig.state, rig.engine, run, Ending.EVICTED)
    await eventually(lambda: run.pulled.leaving)
    await rig.hold(request)
    await rig.deliver(RequestCancel(request_id=R, reply_to=REPLY))
    waiting = len(rig.state.window)
    rig.broker.down.clear()
    await task

    assert (await rig.failed()).error.code == "cancelled"
    assert waiting == 0
    assert run.ending is Ending.EVICTED


async def test_cancellation_of_a_request_elsewhere_is_remembered(rig: AgentRig):
    await rig.deliver(RequestCancel(request_id=R, reply_to=REPLY))
    assert (R, REPLY) in rig.state.cancelled


async def test_cancel_does_not_affect_another_tenants_request(rig: AgentRig):
    await rig.hold(a_request("r", reply_to=REPLY))
    await rig.deliver(RequestCancel(request_id=R, reply_to="reply.of-another"))
    assert len(rig.state.window) == 1


async def test_cancellations_are_forgotten_oldest_first(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.agent.state.CANCELLED_MEMORY", 2)
    for name in "abc":
        rig.state.cancel(RequestId(name), REPLY)
    assert list(rig.state.cancelled) == [("b", REPLY), ("c", REPLY)]


async def test_command_evicts_a_request(rig: AgentRig):
    _, task = await rig.running(a_request("r"))
    await rig.deliver(EvictRequest(instance_id=I1, request_id=R))
    await task
    assert (await rig.requeued(RESUME)).attempts.evictions == 1


async def test_drain_hands_the_window_back_and_lets_runs_finish(rig: AgentRig):
    run, task = await rig.running(a_request("runs"))
    await rig.hold(a_request("waits"))
    await rig.deliver(DrainInstance(instance_id=I1))
    assert rig.state.draining
    assert (await rig.requeued(RESUME)).request_id == "waits"
    assert (run.ending, rig.stop.is_set()) == (None, False)
    await rig.engine.abort(run.request.request_id)
    await task


async def test_drain_with_exit_ends_the_service(rig: AgentRig):
    await rig.deliver(DrainInstance(instance_id=I1, exit=True))
    assert rig.stop.is_set()


async def test_snapshot_is_answered_with_a_status(rig: AgentRig):
    statuses = await listen(rig, topology.TELEMETRY, "status.#")
    await rig.hold(a_request("waits"))
    run, task = await rig.running(a_request("runs"))
    rig.state.plan = a_plan(MODEL, epoch=7)
    await rig.deliver(SnapshotRequested())
    status = decode_status((await rig.far.take(statuses)).body)
    assert (status.instance_id, status.model, status.plan_epoch) == ("i1", MODEL, 7)
    assert (status.running, status.waiting) == (1, 1)
    # The waiting request needs 4 + 24 tokens, and the running request has 24 tokens left to
    # generate. By the prior, each token takes two milliseconds.
    assert status.backlog_tokens == 52
    assert status.backlog_s == pytest.approx(0.104)
    await rig.engine.abort(run.request.request_id)
    await task


async def test_unknown_message_kinds_are_ignored(rig: AgentRig):
    delivery = LooseDelivery(body=b'{"kind": "lso.teleport.v1"}')
    await rig.handler.handle(delivery)
    assert delivery.settlements == [Settlement.ACK]
