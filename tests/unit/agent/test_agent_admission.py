"""Admission: which request runs next, and which running requests are displaced."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from services.agent.admission import SUSPECT_CRASHES
from services.agent.settings import PullSettings
from shared.contracts.base import ModelName
from shared.contracts.plans import LaneQuota, PlanPublished, Segment
from shared.contracts.requests import FinishReason, QueuedRequest
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, MODEL, a_request, lane_of, sampling
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import AgentRig, open_agent
from tests.unit.agent.tasks import admitting

pytestmark = pytest.mark.virtual_time

BEST_EFFORT_RESUME = lane_of(BEST_EFFORT).resume_name


async def hold_all(rig: AgentRig, *requests: QueuedRequest) -> None:
    for request in requests:
        await rig.hold(request)


async def rested(rig: AgentRig) -> set[str]:
    """Running requests after admission has run several times without changes."""
    for _ in range(5):
        rig.state.wake()
        for _ in range(10):
            await asyncio.sleep(0)
    return set(rig.state.runs)


def best_effort_work(count: int) -> list[QueuedRequest]:
    return [a_request(f"f{number}", slo=BEST_EFFORT) for number in range(count)]


async def test_window_head_runs_first_up_to_the_engines_slots(rig: AgentRig):
    rig.engine.max_running = 1
    await hold_all(rig, a_request("later", slo=BATCH), a_request("sooner"))
    async with admitting(rig):
        await rig.engine.began("sooner")
        assert await rested(rig) == {"sooner"}
        rig.engine.emit("sooner", 20, finish=FinishReason.LENGTH)
        await rig.engine.began("later")


async def test_kv_memory_limits_requests_at_their_full_length(rig: AgentRig):
    """Requests of 4 + 46 tokens: two fit into 120 tokens."""
    rig.engine.kv_capacity_tokens = 120
    await hold_all(rig, *(a_request(f"r{n}", sampling=sampling(46)) for n in range(3)))
    async with admitting(rig):
        assert await rested(rig) == {"r0", "r1"}


async def test_request_larger_than_the_engine_runs_alone(rig: AgentRig):
    """Admission passes the request to the engine, which refuses it."""
    rig.engine.kv_capacity_tokens = 10
    await hold_all(rig, a_request("r"))
    async with admitting(rig):
        assert await rested(rig) == {"r"}


async def test_best_effort_leaves_slots_for_urgent_arrivals(rig: AgentRig):
    """Beside a regular request, best-effort requests get three quarters of eight slots."""
    await hold_all(rig, a_request("regular"), *best_effort_work(8))
    async with admitting(rig):
        assert len(await rested(rig)) == 1 + 6
        await hold_all(rig, a_request("urgent"))
        assert "urgent" in await rested(rig)


async def test_best_effort_fills_an_engine_without_regular_requests(rig: AgentRig):
    await hold_all(rig, *best_effort_work(10))
    async with admitting(rig):
        assert len(await rested(rig)) == rig.engine.max_running == 8
        await hold_all(rig, a_request("urgent"))
        await rig.engine.began("urgent")


async def test_aged_best_effort_also_leaves_slots_for_urgent_arrivals(rig: AgentRig):
    old = NOW - 2 * rig.pull.aging_bound_s
    aged = [a_request(f"f{n}", slo=BEST_EFFORT, arrived_at=old) for n in range(8)]
    await hold_all(rig, a_request("regular"))
    async with admitting(rig):
        await rig.engine.began("regular")
        await hold_all(rig, *aged)
        assert len(await rested(rig)) == 1 + 6
        await hold_all(rig, a_request("urgent"))
        assert "urgent" in await rested(rig)


async def test_relegated_work_counts_as_best_effort(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
):
    pull = PullSettings(best_effort_running_share=0.5)
    async with open_agent(registry, tokenizers, pull=pull) as rig:
        relegated = [a_request(f"r{n}", relegated=True) for n in range(3)]
        await hold_all(rig, a_request("regular"), *best_effort_work(3), *relegated)
        async with admitting(rig):
            assert await rested(rig) == {"regular", "r0", "r1", "r2", "f0"}


async def test_one_best_effort_request_may_always_run(rig: AgentRig):
    rig.engine.max_running = 1
    await hold_all(rig, *best_effort_work(2))
    async with admitting(rig):
        assert await rested(rig) == {"f0"}


async def test_best_effort_yields_to_work_with_a_reachable_slo(rig: AgentRig):
    """The run with the least computed tokens is evicted; its message carries its progress."""
    rig.engine.kv_capacity_tokens = 100
    await hold_all(rig, *(a_request(f"f{n}", slo=BEST_EFFORT) for n in range(3)))
    async with admitting(rig):
        assert await rested(rig) == {"f0", "f1", "f2"}
        for name in ("f0", "f1", "f2"):
            await rig.engine.began(name)
        rig.engine.emit("f0", 20, 21, 22)
        rig.engine.emit("f1", 20)
        rig.engine.emit("f2", 20, 21)
        await eventually(lambda: len(rig.state.runs["f2"].answer.token_ids) == 2)  # type: ignore[index]  # a NewType
        await hold_all(rig, a_request("urgent"))
        await rig.engine.began("urgent")
        assert await rested(rig) == {"f0", "f2", "urgent"}
        evicted = await rig.requeued(BEST_EFFORT_RESUME)
        assert (evicted.request_id, evicted.progress.token_ids) == ("f1", (20,))


async def test_reachable_work_does_not_yield_to_other_work(rig: AgentRig):
    rig.engine.max_running = 1
    await hold_all(rig, a_request("first", slo=BATCH))
    async with admitting(rig):
        assert await rested(rig) == {"first"}
        await hold_all(rig, a_request("more urgent"))
        assert await rested(rig) == {"first"}
        assert rig.state.runs["first"].ending is None  # type: ignore[index]  # a NewType


async def test_best_effort_does_not_yield_to_best_effort(rig: AgentRig):
    rig.engine.kv_capacity_tokens = 30
    await hold_all(rig, *best_effort_work(2))
    async with admitting(rig):
        assert await rested(rig) == {"f0"}
        assert all(run.ending is None for run in rig.state.runs.values())


async def test_request_suspected_of_crashes_waits_until_it_can_run_alone(rig: AgentRig):
    await hold_all(rig, a_request("healthy"))
    async with admitting(rig):
        assert await rested(rig) == {"healthy"}
        await hold_all(rig, a_request("suspect", crashes=SUSPECT_CRASHES))
        assert await rested(rig) == {"healthy"}
        rig.engine.emit("healthy", 20, finish=FinishReason.LENGTH)
        await rig.engine.began("suspect")
        await hold_all(rig, a_request("next"))
        assert await rested(rig) == {"suspect"}
        rig.engine.emit("suspect", 20, finish=FinishReason.LENGTH)
        await rig.engine.began("next")


async def test_request_that_ran_in_one_crash_may_run_with_others(rig: AgentRig):
    await hold_all(rig, a_request("a"), a_request("b", crashes=SUSPECT_CRASHES - 1))
    async with admitting(rig):
        assert await rested(rig) == {"a", "b"}


async def test_no_request_starts_during_a_swap_or_a_drain(rig: AgentRig):
    rig.state.swaps = 1
    await hold_all(rig, a_request("r"))
    async with admitting(rig):
        assert await rested(rig) == set()
        rig.state.draining, rig.state.swaps = 1, False
        assert await rested(rig) == set()
        rig.engine.alive, rig.state.draining = False, False
        assert await rested(rig) == set()
        rig.engine.alive = True
        assert await rested(rig) == {"r"}


async def test_returned_request_waits_until_its_last_run_is_over(rig: AgentRig):
    request = a_request("r")
    run, task = await rig.running(request)
    run.pulled.leaving = True
    await rig.hold(request)
    async with admitting(rig):
        await rested(rig)
        assert rig.state.runs[request.request_id] is run
        rig.engine.emit("r", 20, finish=FinishReason.LENGTH)
        await task
        await rig.engine.began("r")
        assert rig.state.runs[request.request_id] is not run


async def test_request_counts_as_running_once_it_leaves_the_window(rig: AgentRig):
    """A model swap must not count the instance as empty while a request moves to the engine."""
    await hold_all(rig, a_request("r"))
    created: list[int] = []

    class Tasks:
        def create_task(self, coroutine: object, *, name: str) -> None:
            created.append(len(rig.state.runs))
            coroutine.close()  # type: ignore[attr-defined]  # a coroutine
            rig.stop.set()

    await rig.admission.work(rig.stop, Tasks())  # type: ignore[arg-type]  # all that is asked of it
    assert created == [1]


async def test_late_request_leaves_an_engine_in_which_requests_wait(rig: AgentRig, monkeypatch):
    """The request would keep its window slot; it is returned, and relegated at the next pull."""
    snapshot = rig.engine.snapshot
    monkeypatch.setattr(rig.engine, "snapshot", lambda: replace(snapshot(), waiting=1))
    await hold_all(rig, a_request("begun"), a_request("waits"))
    async with admitting(rig):
        await rig.engine.began("begun")
        await rig.engine.began("waits")
        rig.engine.emit("begun", 20)
        await eventually(lambda: rig.state.runs["begun"].answer.begun)  # type: ignore[index]  # a NewType
        rig.clock.advance(60.0)
        await eventually(lambda: set(rig.state.runs) == {"begun"})
        back = await rig.requeued(lane_of().resume_name)
        assert back.request_id == "waits"


async def test_handed_back_requests_do_not_exceed_those_waiting(rig: AgentRig, monkeypatch):
    """A running prefill stays, because its computed tokens would be lost."""
    snapshot = rig.engine.snapshot
    waits = lambda: int("waits" in rig.engine.running)  # noqa: E731
    monkeypatch.setattr(rig.engine, "snapshot", lambda: replace(snapshot(), waiting=waits()))
    await hold_all(rig, a_request("prefilling"), a_request("waits"))
    async with admitting(rig):
        await rig.engine.began("waits")
        rig.clock.advance(60.0)
        await eventually(lambda: set(rig.state.runs) == {"prefilling"})
        assert (await rig.requeued(lane_of().resume_name)).request_id == "waits"
        await asyncio.sleep(0.2)
        assert set(rig.state.runs) == {"prefilling"}


async def test_requests_of_a_later_group_yield_to_a_new_head(rig: AgentRig):
    """A request yields although its SLO is reachable, since the plan serves its group later."""
    chat, batch = lane_of(), lane_of(BATCH)
    rig.engine.max_running = 1
    await hold_all(rig, a_request("later", slo=BATCH))
    async with admitting(rig):
        await rig.engine.began("later")
        await hold_all(rig, a_request("head"))
        assert await rested(rig) == {"later"}
        rig.state.plan = replace_segments(a_plan(MODEL), chat.queue_name, batch.queue_name)
        await rig.engine.began("head")
        assert (await rig.requeued(batch.resume_name)).request_id == "later"


def replace_segments(plan: PlanPublished, *lanes: str) -> PlanPublished:
    """Publish a plan with one segment for each lane, all of one model."""
    segments = tuple(Segment(model=MODEL, lanes=(LaneQuota(lane=lane, quota=1),)) for lane in lanes)
    queue = msgspec.structs.replace(plan.queue, segments=segments)
    return msgspec.structs.replace(plan, queue=queue)
