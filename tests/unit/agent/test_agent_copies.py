"""Older and newer messages of one request, which at-least-once delivery produces."""

import msgspec
import pytest

from services.agent.state import Ending
from shared.contracts.control import RunStop, StopReason
from shared.contracts.requests import Progress
from tests.brokers import eventually
from tests.queued import a_request, lane_of
from tests.unit.agent.rig import AgentRig
from tests.unit.agent.tasks import working

pytestmark = pytest.mark.virtual_time

LANE, RESUME = lane_of().queue_name, lane_of().resume_name


async def test_newer_copy_replaces_a_waiting_request(rig: AgentRig):
    """The producer has seen the newer message's hop, and would stop a run of the older one."""
    await rig.hold(a_request("r"))
    progress = Progress(token_ids=(20, 21))
    await rig.put(a_request("r", hop=2, progress=progress), queue=RESUME)
    rig.sources(RESUME)
    await rig.puller.pull_now(1)
    (waiting,) = rig.state.window

    assert (waiting.attempts.hop, waiting.progress) == (2, progress)
    assert len(rig.state.pulled[waiting.request_id].deliveries) == 2
    await rig.residency.hand_back_window()


async def test_older_copy_changes_nothing(rig: AgentRig):
    await rig.hold(newer := a_request("r", hop=2))
    await rig.put(a_request("r"))
    rig.sources(LANE)
    await rig.puller.pull_now(1)

    assert list(rig.state.window) == [newer]
    assert len(rig.state.pulled[newer.request_id].deliveries) == 2
    await rig.residency.hand_back_window()


async def test_newer_copy_survives_a_stop_of_the_older_run(rig: AgentRig):
    run, task = await rig.running(a_request("r"))
    newer = a_request("r", hop=2)
    await rig.put(newer, queue=RESUME)
    rig.sources(RESUME)
    await rig.puller.pull_now(1)
    await rig.deliver(
        RunStop(request_id=run.request.request_id, run_id=run.run_id, reason=StopReason.SUPERSEDED)
    )
    await task

    assert run.ending is Ending.STOPPED
    again = await rig.requeued(RESUME)
    assert again == msgspec.structs.replace(
        newer, attempts=msgspec.structs.replace(newer.attempts, hop=3)
    )


async def test_newer_copy_is_not_pulled_repeatedly_while_the_older_runs(rig: AgentRig):
    run, task = await rig.running(a_request("r"))
    await rig.put(a_request("r", hop=2), queue=RESUME)
    rig.sources(RESUME)
    async with working(rig.puller.work(rig.stop), rig):
        await eventually(lambda: RESUME in rig.state.order.queues and not rig.state.pulling)
        rig.residency.noticed(RESUME)
        await eventually(lambda: len(rig.state.departed) == 1)
        rig.residency.noticed(RESUME)
    assert (await rig.requeued(RESUME)).attempts.hop == 3
    rig.engine.emit("r", 20)
    await rig.engine.abort(run.request.request_id)
    await task
