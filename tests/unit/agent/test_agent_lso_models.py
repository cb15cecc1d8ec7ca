"""Activating, warming and cooling models: effects and refusals."""

import asyncio

import pytest

from services.agent.state import Ending
from shared.contracts.base import ModelName, RequestId
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import EngineError, NoRoomError
from shared.contracts.requests import FinishReason
from solver.planning.lso.operations import (
    Activate,
    Cool,
    Warm,
)
from tests.brokers import eventually
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import REPLY, AgentRig
from tests.unit.agent.scripted_engine import AbleEngine
from tests.unit.agent.tasks import counted, run_lso, working

pytestmark = pytest.mark.virtual_time

DONE, ALREADY = LsoOutcome.DONE, LsoOutcome.ALREADY
REFUSED, FAILED = LsoOutcome.REFUSED, LsoOutcome.FAILED
LANE, RESUME = lane_of().queue_name, lane_of().resume_name
R = RequestId("r")


class TestActivate:
    async def test_model_becomes_active(self, able: AgentRig):
        result = await run_lso(able, Activate(model=OTHER))

        assert (result.outcome, result.num_bytes) == (DONE, 2000)
        assert (able.state.model, able.state.swapping) == (OTHER, False)
        assert (await run_lso(able, Activate(model=OTHER))).outcome is ALREADY

    async def test_unknown_model_error_lists_the_known_models(self, able: AgentRig):
        result = await run_lso(able, Activate(model=ModelName("gpt-99")))

        assert result.outcome is REFUSED
        assert MODEL in result.message

    async def test_failure_has_the_engines_message(self, able: AgentRig):
        able.engine.fail_activate = [EngineError("no memory on the device")]

        result = await run_lso(able, Activate(model=OTHER))

        assert (result.outcome, result.message) == (FAILED, "no memory on the device")
        assert (able.state.model, able.state.swapping) == (None, False)

    async def test_run_that_drains_in_time_is_not_evicted(self, able: AgentRig):
        _, task = await able.running(a_request("r"))
        swap = asyncio.create_task(run_lso(able, Activate(model=OTHER, drain_s=60.0)))
        await eventually(lambda: able.state.swapping)
        status = able.reporter.status()
        assert (status.model, status.activating, status.next_model) == (MODEL, OTHER, OTHER)
        able.engine.emit("r", 20, finish=FinishReason.LENGTH)

        assert (await swap).outcome is DONE
        assert able.reporter.status().activating is None
        await task
        assert (able.state.totals.completed, able.state.totals.evicted) == (1, 0)

    async def test_run_that_does_not_drain_in_time_is_evicted(self, able: AgentRig):
        await able.running(a_request("r"))

        result = await run_lso(able, Activate(model=OTHER, drain_s=0.01))

        assert "1 evicted" in result.message
        assert (await able.requeued(RESUME)).request_id == "r"
        assert counted(able, "lsos_total", kind="evict", outcome="done") == 1

    async def test_operators_model_stays_until_the_next_plan(self, able: AgentRig):
        async with working(able.residency.work(able.stop), able):
            able.residency.plan_changed(a_plan(MODEL, epoch=1))
            assert (await able.residency.activate(OTHER)).outcome is DONE
            able.residency.plan_changed(a_plan(MODEL, epoch=1))
            await asyncio.sleep(0.5)
            assert able.state.model == OTHER
            able.residency.plan_changed(a_plan(MODEL, epoch=2))
            await eventually(lambda: able.state.model == MODEL)

    async def test_activation_of_the_active_model_does_not_admit_during_a_swap(
        self, able: AgentRig
    ):
        _, task = await able.running(a_request("r"))
        swap = asyncio.create_task(run_lso(able, Activate(model=OTHER, drain_s=60.0)))
        await eventually(lambda: able.state.swapping)
        assert (await able.residency.activate(MODEL)).ok
        assert able.state.swapping
        able.engine.emit("r", 20, finish=FinishReason.LENGTH)
        await swap
        await task
        assert not able.state.swapping

    async def test_request_between_two_models_is_returned(self, able: AgentRig):
        able.engine.model = OTHER
        run = able.runner.begin(await able.pulled(a_request("r")))
        await able.runner.run(run)
        assert await able.far.ready(RESUME) == 1

    async def test_request_cancelled_between_two_models_ends(self, able: AgentRig):
        able.engine.model = OTHER
        run = able.runner.begin(await able.pulled(a_request("r", reply_to=REPLY)))
        run.ending = Ending.CANCELLED
        await able.runner.run(run)
        assert (await able.failed()).error.code == "cancelled"


class TestWarm:
    async def test_weights_are_loaded_into_and_removed_from_host_memory(
        self, able: AgentRig, engine: AbleEngine
    ):
        result = await run_lso(able, Warm(model=OTHER))
        assert (result.outcome, result.num_bytes, engine.warmed) == (DONE, 2000, [OTHER])
        assert (await run_lso(able, Warm(model=OTHER))).outcome is ALREADY

        assert (await run_lso(able, Cool(model=OTHER))).outcome is DONE
        assert (await run_lso(able, Cool(model=OTHER))).outcome is ALREADY
        assert engine.warmed == []

    async def test_model_without_room_is_refused_with_the_engines_message(
        self, able: AgentRig, engine: AbleEngine
    ):
        engine.fail_warm = [NoRoomError("1999 of 2000 bytes are taken")]

        result = await run_lso(able, Warm(model=OTHER))

        assert (result.outcome, result.message) == (REFUSED, "1999 of 2000 bytes are taken")

    async def test_active_model_is_not_cooled(self, able: AgentRig):
        assert (await run_lso(able, Cool(model=MODEL))).outcome is REFUSED

    async def test_failed_warm_is_a_failure(self, able: AgentRig, engine: AbleEngine):
        engine.fail_warm = [EngineError("the disk is gone")]

        assert (await run_lso(able, Warm(model=OTHER))).message == "the disk is gone"

    async def test_next_model_of_the_plan_is_warmed_during_work(
        self, able: AgentRig, engine: AbleEngine
    ):
        async with working(able.residency.work(able.stop), able):
            able.residency.plan_changed(a_plan(MODEL, OTHER))
            await eventually(lambda: engine.warmed == [OTHER])
