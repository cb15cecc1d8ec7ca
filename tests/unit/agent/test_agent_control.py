"""Messages of leaders, estimators, producers and operators, as events of the instance."""

import pytest

from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import Message, RequestId, RunId, TenantId, encode
from shared.contracts.control import (
    DrainInstance,
    LaneNonempty,
    QueuesRetired,
    QueuesRetiring,
    RequestCancel,
    RunStop,
    StopReason,
    StoredCancel,
)
from shared.contracts.estimates import Profile
from shared.contracts.requests import FinishReason, RunStarted, StoredWork
from tests.agents.plans import a_plan
from tests.agents.rig import I1, LANE, REPLY, RESUME, AgentRig, R
from tests.brokers import eventually
from tests.queued import MODEL, OTHER, a_request

pytestmark = pytest.mark.virtual_time


async def test_plan_is_followed(rig: AgentRig):
    await rig.deliver(a_plan(OTHER, epoch=3))

    assert rig.engine.activations == [MODEL, OTHER]
    assert (await rig.status()).plan_epoch == 3


@pytest.mark.parametrize("source", ["grouper", ""])
async def test_only_a_notice_with_a_source_leads_to_a_pull(rig: AgentRig, source: str):
    """RabbitMQ closes a connection that polls a queue whose process has not started."""
    await topology.declare_work_queue(rig.far, LANE)
    await rig.far.publish(topology.LANES, LANE, OutMessage(body=encode(a_request("r"))))
    await rig.deliver(LaneNonempty(queue=LANE, source=source, put=1), topology.CONTROL_LANE)

    assert rig.engine.running == ({"r"} if source else set())


@pytest.mark.parametrize(
    "message",
    [
        *(
            LaneNonempty(queue=queue, source="grouper", put=1)
            for queue in ("lane.x", "overflow.x", "resume.1.tiny-llama.x")
        ),
        b'{"kind": "lso.teleport.v1"}',
        b"\xff",
    ],
    ids=str,
)
async def test_invalid_and_unknown_messages_are_ignored(rig: AgentRig, message: Message | bytes):
    body = message if isinstance(message, bytes) else encode(message)
    await rig.far.publish(topology.CONTROL, topology.CONTROL_LANE, OutMessage(body=body))
    await rig.running(a_request("r"))

    assert set(rig.instance.noticed) == {LANE}


async def test_newest_profile_of_this_kind_of_engine_is_kept(rig: AgentRig):
    def profile(version: int, engine: str = "scripted") -> Profile:
        return Profile(model=MODEL, engine=engine, device="paper", version=version, at=0.0)

    for each in (profile(2), profile(3), profile(1), profile(9, "other")):
        await rig.far.publish(topology.PROFILES, "", OutMessage(body=encode(each)))
    await rig.settled()

    assert rig.instance.profiles == {MODEL: profile(3)}


async def test_stopped_run_is_only_acknowledged(rig: AgentRig):
    await rig.running(a_request("r", reply_to=REPLY))
    (started,) = await rig.replies()
    assert isinstance(started, RunStarted)
    for run_id, running in ((RunId("other"), {"r"}), (started.run_id, set())):
        stop = RunStop(request_id=R, run_id=run_id, reason=StopReason.DUPLICATE)
        await rig.deliver(stop, topology.control_instance(I1))
        assert rig.engine.running == running

    assert await rig.replies() == []
    assert [await rig.is_empty(queue) for queue in (LANE, RESUME)] == [True, True]


async def test_producer_cancels_its_own_request_only(rig: AgentRig):
    await rig.running(a_request("r", reply_to=REPLY))
    for reply_to, running in (("reply.of-another", {"r"}), (REPLY, set())):
        cancel = RequestCancel(request_id=R, reply_to=reply_to)
        await rig.deliver(cancel, topology.CONTROL_CANCEL)
        assert rig.engine.running == running

    assert (await rig.failed()).error.code == "cancelled"
    assert await rig.far.ready(topology.DEAD_LETTERS) == 0
    assert await rig.is_empty(LANE)


async def test_a_stored_request_is_cancelled_with_the_key_of_gateways_only(rig: AgentRig):
    """The broker lets producers publish with the key of their own cancellations."""
    await rig.running(a_request("r", reply_to=None, stored=StoredWork(digest="d", kept_s=60.0)))
    cancel = StoredCancel(tenant=str(a_request("r").tenant), request_id=R)
    for key, running in (
        (topology.CONTROL_CANCEL, {"r"}),
        (topology.COMMAND_CANCEL, set[str]()),
    ):
        await rig.deliver(cancel, key)
        assert rig.engine.running == running


async def test_a_request_without_a_reply_queue_is_cancelled_by_its_tenant_only(rig: AgentRig):
    """The broker has authenticated the sender; what a message says does not count."""
    cancel = RequestCancel(request_id=R)
    await rig.running(a_request("r", reply_to=None, tenant=TenantId("another")))
    for user_id in (None, "guest"):
        await rig.deliver(cancel, topology.CONTROL_CANCEL, user_id=user_id)
        assert rig.engine.running == {"r"}
    await rig.running(a_request("s", reply_to=None, tenant=TenantId("guest")))
    await rig.deliver(
        RequestCancel(request_id=RequestId("s")), topology.CONTROL_CANCEL, user_id="guest"
    )

    assert rig.engine.running == {"r"}


async def test_snapshot_is_answered_with_the_present_load(narrow: AgentRig):
    await narrow.waiting(a_request("waits"))
    await narrow.deliver(DrainInstance(instance_id=I1))
    assert (await narrow.requeued(RESUME)).request_id == "waits"
    status = await narrow.status()

    assert (status.instance_id, status.model) == ("i1", MODEL)
    assert (status.waiting, status.running, status.draining) == (0, 1, True)


async def test_drain_with_exit_returns_all_requests_and_ends_the_agent(narrow: AgentRig):
    narrow.engine.emit("blocker", 20)
    await narrow.waiting(a_request("waits"))
    await narrow.deliver(DrainInstance(instance_id=I1, exit=True))
    await eventually(narrow.work.done)
    back = [await narrow.requeued(RESUME) for _ in range(2)]

    returned = [(each.request_id, each.progress.token_ids) for each in back]
    assert returned == [("waits", ()), ("blocker", (20,))]
    assert await narrow.is_empty(LANE)


async def test_queue_that_is_about_to_be_deleted_is_released_once_it_is_not_used(rig: AgentRig):
    await rig.running(a_request("r"))
    await rig.deliver(QueuesRetiring(queues=(LANE,)), topology.CONTROL_RETIREMENT)
    used = (await rig.status()).released
    rig.engine.emit("r", 20, finish=FinishReason.LENGTH)
    await rig.settled()
    unused = (await rig.status()).released
    await rig.deliver(QueuesRetired(deleted=(LANE,)), topology.CONTROL_RETIREMENT)

    assert (used, unused, (await rig.status()).released) == ((), (LANE,), ())
