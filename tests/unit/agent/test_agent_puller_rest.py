"""A puller that may not pull rests, however much waits for it."""

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

LANE = a_request(slo=BEST_EFFORT).lane
WATCHED_S = 0.3


class Looks:
    """How often the engine is looked at."""

    def __init__(self, rig: AgentRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._snapshot = rig.engine.snapshot
        monkeypatch.setattr(rig.engine, "snapshot", self)

    def __call__(self) -> EngineSnapshot:
        self.count += 1
        return self._snapshot()


async def test_one_full_of_filler_rests_and_goes_on_when_some_has_left(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    fillers = [a_request(f"f{n}", slo=BEST_EFFORT) for n in range(rig.pull.best_effort_window)]
    for request in fillers:
        await rig.hold(request)
    await rig.put(a_request("waits", slo=BEST_EFFORT))
    lane = Source(queue=LANE, kind=SourceKind.LANE, time_left_s=math.inf)
    rig.state.order.set_sources([lane], NOW)
    looks = Looks(rig, monkeypatch)
    async with working(rig.puller.work(rig.stop), rig):
        await asyncio.sleep(WATCHED_S)
        assert looks.count < 10
        assert await rig.far.ready(LANE) == 1

        rig.state.release(fillers[0].request_id)
        rig.state.wake()
        await eventually(lambda: "waits" in rig.state.window)
    await rig.residency.hand_back_window()


@pytest.mark.parametrize("why", ["drains", "swaps", "restarts"])
async def test_what_was_routed_to_one_that_may_not_pull_goes_back(rig: AgentRig, why: str):
    """Nobody else reads its inbox."""
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


async def test_one_that_drains_rests(rig: AgentRig, monkeypatch: pytest.MonkeyPatch):
    await rig.put(a_request("waits", slo=BEST_EFFORT))
    rig.sources(LANE)
    rig.state.draining = True
    looks = Looks(rig, monkeypatch)
    async with working(rig.puller.work(rig.stop), rig):
        await asyncio.sleep(WATCHED_S)

    assert looks.count < 10
    assert await rig.far.ready(LANE) == 1
