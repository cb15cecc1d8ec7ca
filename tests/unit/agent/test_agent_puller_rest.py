"""A puller that must not pull sleeps, regardless of waiting work."""

import asyncio
import math
from contextlib import AsyncExitStack

import pytest

from services.agent.backends.base import EngineSnapshot
from shared.contracts.lanes import inbox_name
from solver.scheduling.pulling import Source, SourceKind
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import BEST_EFFORT, a_request, lane_of
from tests.unit.agent.rig import AgentRig
from tests.unit.agent.tasks import working

pytestmark = pytest.mark.virtual_time

LANE = a_request(slo=BEST_EFFORT).lane
WATCHED_S = 0.3


class Looks:
    """Counts the inspections of the engine."""

    def __init__(self, rig: AgentRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._snapshot = rig.engine.snapshot
        monkeypatch.setattr(rig.engine, "snapshot", self)

    def __call__(self) -> EngineSnapshot:
        self.count += 1
        return self._snapshot()


async def test_puller_full_of_best_effort_sleeps_until_some_leaves(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    best_effort_work = [
        a_request(f"f{n}", slo=BEST_EFFORT) for n in range(rig.pull.best_effort_window)
    ]
    for request in best_effort_work:
        await rig.hold(request)
    await rig.put(a_request("waits", slo=BEST_EFFORT))
    lane = Source(queue=LANE, kind=SourceKind.LANE, time_left_s=math.inf)
    rig.state.order.set_sources([lane], NOW)
    looks = Looks(rig, monkeypatch)
    async with working(rig.puller.work(rig.stop), rig):
        await asyncio.sleep(WATCHED_S)
        assert looks.count < 10
        assert await rig.far.ready(LANE) == 1

        rig.state.release(best_effort_work[0].request_id)
        rig.state.wake()
        await eventually(lambda: "waits" in rig.state.window)
    await rig.residency.hand_back_window()


@pytest.mark.parametrize("why", ["drains", "swaps", "restarts"])
async def test_routed_request_is_returned_when_pulling_is_not_allowed(rig: AgentRig, why: str):
    """No other instance reads the inbox in which the request waits."""
    lane = a_request("routed").lane
    inbox = inbox_name(rig.state.instance_id)
    rig.state.order.set_sources(
        [
            Source(queue=lane, kind=SourceKind.LANE, time_left_s=1.0),
            Source(queue=inbox, kind=SourceKind.INBOX, time_left_s=0.0),
        ],
        NOW,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(working(rig.puller.work(rig.stop), rig))
        if why == "drains":
            rig.state.draining = True
        else:
            stack.enter_context(rig.state.swap())
        if why == "restarts":
            rig.engine.die()
        await rig.put(a_request("waits"))
        await rig.put(a_request("routed"), queue=inbox)
        rig.residency.noticed(inbox)
        returned = await rig.requeued(lane_of().resume_name)

        assert (returned.request_id, returned.attempts.hop) == ("routed", 1)
        assert await rig.far.ready(lane) == 1
        assert not rig.reporter.status().takes_in


async def test_draining_puller_sleeps(rig: AgentRig, monkeypatch: pytest.MonkeyPatch):
    await rig.put(a_request("waits", slo=BEST_EFFORT))
    rig.sources(LANE)
    rig.state.draining = True
    looks = Looks(rig, monkeypatch)
    async with working(rig.puller.work(rig.stop), rig):
        await asyncio.sleep(WATCHED_S)

    assert looks.count < 10
    assert await rig.far.ready(LANE) == 1
