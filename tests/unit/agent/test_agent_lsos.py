"""Each operation: its effect, its refusals, and its result when repeated."""

import asyncio
from typing import Any

import pytest

from services.agent.lso.engine import NO_LIMIT
from services.agent.settings import PullSettings
from shared.contracts.base import ModelName, RequestId
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from solver.planning.lso.operations import (
    Activate,
    Checkpoint,
    ClearCaches,
    Cool,
    Evict,
    Lso,
    Preempt,
    Pull,
    SetScheduling,
    Warm,
)
from tests.brokers import eventually
from tests.queued import BATCH, BEST_EFFORT, OTHER, a_request, lane_of
from tests.unit.agent.rig import AgentRig, open_agent
from tests.unit.agent.scripted_engine import AbleEngine
from tests.unit.agent.tasks import counted, run_lso

pytestmark = pytest.mark.virtual_time

DONE, ALREADY = LsoOutcome.DONE, LsoOutcome.ALREADY
REFUSED, FAILED = LsoOutcome.REFUSED, LsoOutcome.FAILED
LANE, RESUME = lane_of().queue_name, lane_of().resume_name
R = RequestId("r")


class TestEvict:
    async def test_run_is_returned_with_its_progress(self, able: AgentRig):
        ran, task = await able.running(a_request("r"))
        able.engine.emit("r", 20, 21)
        await eventually(lambda: ran.answer.token_ids == [20, 21])

        result = await run_lso(able, Evict(request_ids=(R,)))

        assert (result.outcome, result.num_bytes) == (DONE, 6 * 16)
        assert (await able.requeued(RESUME)).progress.token_ids == (20, 21)
        assert task.done() or await asyncio.wait_for(task, 60) is None

    async def test_repeated_eviction_is_already_done(self, able: AgentRig):
        await able.running(a_request("r"))
        await run_lso(able, Evict(request_ids=(R,)))

        result = await run_lso(able, Evict(request_ids=(R,)))

        assert result.outcome is ALREADY
        assert "evicted" in result.message

    async def test_run_that_finishes_first_is_not_evicted(self, able: AgentRig):
        await able.running(a_request("r"))
        able.engine.emit("r", 20, finish=FinishReason.LENGTH)

        result = await run_lso(able, Evict(request_ids=(R,)))

        assert result.outcome is ALREADY
        assert await able.far.ready(RESUME) == 0

    async def test_unknown_request_is_refused(self, able: AgentRig):
        result = await run_lso(able, Evict(request_ids=(R,)))

        assert result.outcome is REFUSED
        assert "r is unknown to i1" in result.message

    async def test_waiting_request_is_refused(self, able: AgentRig):
        await able.hold(a_request("r"))

        result = await run_lso(able, Evict(request_ids=(R,)))

        assert (result.outcome, len(able.state.window)) == (REFUSED, 1)
        assert "waits in the window" in result.message

    async def test_requests_of_a_group_are_evicted_in_one_operation(self, able: AgentRig):
        names = tuple(RequestId(f"r{number}") for number in range(4))
        for name in names:
            await able.running(a_request(name))

        result = await run_lso(able, Evict(request_ids=names))

        assert result.outcome is DONE
        assert {(await able.requeued(RESUME)).request_id for _ in names} == set(names)


class TestPull:
    async def test_pull_also_reads_a_queue_that_seemed_empty(self, able: AgentRig):
        able.sources(LANE)
        able.state.order.empty(LANE, able.clock.now())
        for name in ("a", "b", "c"):
            await able.put(a_request(name))

        result = await run_lso(able, Pull(count=2))

        assert (result.outcome, result.message) == (DONE, "2 pulled")
        assert len(able.state.window) == 2

    async def test_pull_stays_within_the_bounds(
        self, registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
    ):
        async with open_agent(registry, tokenizers, pull=PullSettings(window=1)) as rig:
            rig.sources(LANE)
            for name in ("a", "b"):
                await rig.put(a_request(name))

            results = [await run_lso(rig, Pull(count=2)) for _ in range(2)]

        assert [result.outcome for result in results] == [DONE, REFUSED]
        assert "1 of 1 requests" in results[1].message

    async def test_token_capacity_of_the_engine_is_a_bound(self, able: AgentRig):
        """Requests of 28 tokens: a second may wait, since the first leaves 2 of 30 tokens."""
        able.engine.kv_capacity_tokens = 30
        able.sources(LANE)
        for name in ("a", "b", "c"):
            await able.put(a_request(name))

        await run_lso(able, Pull(count=3))

        assert len(able.state.window) == 2

    async def test_pull_with_empty_queues_is_already_done(self, able: AgentRig):
        able.sources(LANE)
        await able.put(a_request("r"))
        await able.far.take(LANE)

        assert (await run_lso(able, Pull())).outcome is ALREADY

    async def test_draining_instance_refuses_to_pull(self, able: AgentRig):
        able.state.draining = True

        assert (await run_lso(able, Pull())).outcome is REFUSED


class TestEngine:
    async def test_limits_change_on_a_running_engine(self, able: AgentRig, engine: AbleEngine):
        assert (await run_lso(able, SetScheduling(max_running=4))).outcome is DONE
        assert (await run_lso(able, SetScheduling(token_budget=256))).outcome is DONE
        assert (await run_lso(able, SetScheduling(token_budget=256))).outcome is ALREADY

        limits = [(each.token_budget, each.max_running) for each in engine.limits]
        assert limits == [(NO_LIMIT, 4), (256, 4)]
        assert (await run_lso(able, SetScheduling())).outcome is REFUSED

    async def test_preemption_reports_whether_there_was_work_to_drop(
        self, able: AgentRig, engine: AbleEngine
    ):
        assert (await run_lso(able, Preempt())).outcome is DONE
        engine.preemptible = False
        assert (await run_lso(able, Preempt())).outcome is ALREADY

    async def test_caches_are_cleared(self, able: AgentRig, engine: AbleEngine):
        result = await run_lso(able, ClearCaches())

        assert (result.outcome, result.num_bytes, engine.num_cleared) == (DONE, 4096, 1)


class TestCheckpoint:
    async def test_request_is_checkpointed_from_its_next_run_on(self, able: AgentRig):
        pulled = await able.pulled(a_request("r"))
        able.state.hold(pulled)

        assert (await run_lso(able, Checkpoint(request_id=R))).outcome is DONE
        assert (await run_lso(able, Checkpoint(request_id=R))).outcome is ALREADY
        able.state.release(R)
        task = asyncio.create_task(able.runner.run(able.runner.begin(pulled)))
        assert (await able.engine.began("r")).checkpointed
        able.engine.emit("r", 20, finish=FinishReason.LENGTH)
        await task

    async def test_engine_without_host_memory_for_its_model_refuses(
        self, able: AgentRig, engine: AbleEngine
    ):
        """The engine's backend supports checkpoints, but not for this model."""
        able.state.hold(await able.pulled(a_request("r")))
        engine.host_kv_capacity_bytes = 0

        result = await run_lso(able, Checkpoint(request_id=R))

        assert (result.outcome, able.state.pulled[R].checkpointed) == (REFUSED, False)
        assert "keeps no KV of tiny-llama" in result.message

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, False),
            ({"slo": BATCH}, True),
            ({"slo": BEST_EFFORT}, True),
            ({"relegated": True}, True),
        ],
        ids=["interactive", "batch", "best effort", "relegated"],
    )
    async def test_displaceable_request_is_checkpointed_anyway(
        self,
        able: AgentRig,
        fields: dict[str, Any],
        expected: bool,  # noqa: FBT001 - a column of the table
    ):
        _, task = await able.running(a_request("r", **fields))

        assert able.engine.requests[R].checkpointed is expected
        await able.engine.abort(R)
        await task

    async def test_unknown_request_is_refused(self, able: AgentRig):
        assert (await run_lso(able, Checkpoint(request_id=R))).outcome is REFUSED


@pytest.mark.parametrize(
    "lso",
    [Warm(model=OTHER), Cool(model=OTHER), Preempt(), SetScheduling(max_running=1),
     Checkpoint(request_id=R)],
    ids=lambda lso: lso.kind,
)  # fmt: skip
async def test_engine_without_the_capability_refuses(rig: AgentRig, lso: Lso):
    result = await run_lso(rig, lso)

    assert result.outcome is REFUSED
    assert "scripted" in result.message


class TestExecutor:
    async def test_operations_run_one_after_another(self, able: AgentRig):
        """The eviction runs before the activation, which then finds no request to evict."""
        await able.running(a_request("r"))
        evicted, activated = await asyncio.gather(
            run_lso(able, Evict(request_ids=(R,))), run_lso(able, Activate(model=OTHER))
        )

        assert (evicted.outcome, activated.outcome) == (DONE, DONE)
        assert "evicted" not in activated.message

    async def test_loading_of_weights_does_not_delay_operations_on_runs(
        self, able: AgentRig, engine: AbleEngine, monkeypatch: pytest.MonkeyPatch
    ):
        arrived = asyncio.Event()

        async def slow(model: ModelName) -> float:
            await arrived.wait()
            return 1.0

        monkeypatch.setattr(engine, "warm", slow)
        await able.running(a_request("r"))
        warming = asyncio.create_task(run_lso(able, Warm(model=OTHER)))
        await asyncio.sleep(0)

        assert (await run_lso(able, Evict(request_ids=(R,)))).outcome is DONE
        arrived.set()
        assert (await warming).outcome is DONE

    async def test_failure_ends_its_sequence(self, able: AgentRig):
        able.engine.fail_activate = [EngineError("no")]

        results = await able.executor.run(Activate(model=OTHER), Preempt())

        assert [result.outcome for result in results] == [FAILED]

    async def test_broken_operation_does_not_affect_other_operations(
        self, able: AgentRig, engine: AbleEngine, monkeypatch: pytest.MonkeyPatch
    ):
        async def broken() -> bool:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(engine, "preempt_now", broken)

        result = await run_lso(able, Preempt())

        assert (result.outcome, result.message) == (FAILED, "ZeroDivisionError: oops")
        assert counted(able, "lso_duration_seconds_count", kind="preempt") == 1

    async def test_every_result_is_counted(self, able: AgentRig):
        await able.running(a_request("r"))
        for _ in range(2):
            await run_lso(able, Evict(request_ids=(R,)))
        await run_lso(able, Evict(request_ids=(RequestId("absent"),)))

        outcomes = {
            outcome: counted(able, "lsos_total", kind="evict", outcome=outcome)
            for outcome in ("done", "already", "refused")
        }
        assert outcomes == {"done": 1, "already": 1, "refused": 1}
        assert counted(able, "lso_duration_seconds_count", kind="evict") == 2
        assert counted(able, "lso_bytes_total", kind="evict") == 4 * 16
