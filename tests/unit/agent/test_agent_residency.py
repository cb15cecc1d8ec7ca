"""The active model, and effects of a swap on the previous model's requests."""

import asyncio
from itertools import pairwise

import pytest
from msgspec.structs import replace

from shared.broker import topology
from shared.contracts.base import Decoder, ModelName
from shared.contracts.errors import ContractError, EngineError
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.lanes import inbox_name, relegated_name
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import ModelActivated, Residency
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from tests.brokers import eventually
from tests.queued import BATCH, BEST_EFFORT, MODEL, OTHER, a_request, lane_of, sampling
from tests.unit.agent.parts import PATIENCE_S
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import AgentRig, decode_queued, listen, open_agent
from tests.unit.agent.tasks import admitting, working

pytestmark = pytest.mark.virtual_time

RESUME = lane_of().resume_name
decode_engine: Decoder[ModelActivated] = Decoder(ModelActivated)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.residency.CHECK_PERIOD_S", 0.01)
    monkeypatch.setattr("services.agent.residency.RESTART_PAUSE_S", 0.05)


def following(rig: AgentRig):
    return working(rig.residency.work(rig.stop), rig)


async def test_first_segment_of_the_plan_becomes_active(rig: AgentRig):
    events = await listen(rig, topology.TELEMETRY, topology.OBSERVED_ENGINE_KEY)
    async with following(rig):
        rig.residency.plan_changed(a_plan(OTHER, MODEL))
        await eventually(lambda: rig.state.model == OTHER)
        await eventually(lambda: not rig.state.swapping)
    assert rig.engine.activations == [OTHER]
    assert rig.state.totals.swaps == 1
    event = decode_engine((await rig.far.take(events)).body)
    assert (event.model, event.source, event.duration_s) == (OTHER, Residency.COLD, 0.5)


async def test_plan_of_the_active_model_causes_no_swap(rig: AgentRig):
    rig.residency.plan_changed(a_plan(MODEL, OTHER, lanes=(lane_of().queue_name,)))
    async with following(rig):
        await eventually(lambda: lane_of().queue_name in rig.state.order.queues)
    assert rig.engine.activations == []


async def test_plan_with_a_lower_epoch_is_ignored(rig: AgentRig):
    rig.residency.plan_changed(a_plan(MODEL, epoch=5))
    rig.residency.plan_changed(a_plan(OTHER, epoch=4))
    assert rig.state.plan == a_plan(MODEL, epoch=5)


async def test_plan_with_the_same_epoch_refreshes_its_age(rig: AgentRig):
    rig.residency.plan_changed(a_plan(MODEL, epoch=5))
    rig.clock.advance(3.0)
    rig.residency.plan_changed(a_plan(MODEL, epoch=5))
    assert rig.state.plan_at == rig.clock.now()


async def test_models_that_the_agent_may_not_serve_are_skipped(rig: AgentRig):
    rig.residency.plan_changed(a_plan(ModelName("a model of others"), OTHER))
    async with following(rig):
        await eventually(lambda: rig.state.model == OTHER)


async def test_empty_plan_changes_nothing(rig: AgentRig):
    rig.residency.noticed(lane_of(model=OTHER).queue_name)
    rig.clock.advance(2 * PATIENCE_S)
    rig.residency.plan_changed(a_plan())
    async with following(rig):
        await eventually(lambda: rig.state.order.queues != ())
    assert rig.state.model == MODEL


async def test_swap_hands_the_window_back_and_evicts_runs(rig: AgentRig):
    await rig.hold(a_request("waits"))
    run, task = await rig.running(a_request("runs"))
    rig.engine.emit("runs", 20)
    await eventually(lambda: run.answer.token_ids == [20])
    async with following(rig):
        rig.residency.plan_changed(a_plan(OTHER))
        await eventually(lambda: rig.state.model == OTHER)
    await task
    back = [decode_queued((await rig.far.take(RESUME)).body) for _ in range(2)]
    assert [(r.request_id, r.progress.token_ids) for r in back] == [("waits", ()), ("runs", (20,))]
    assert await rig.back_in_lane(lane_of().queue_name) == 0


async def test_swap_waits_for_pulls_in_progress(rig: AgentRig):
    rig.state.pulls["a queue"] = 1
    async with following(rig):
        rig.residency.plan_changed(a_plan(OTHER))
        await eventually(lambda: rig.state.swapping)
        assert rig.engine.activations == []
        rig.state.pulls.clear()
        await eventually(lambda: rig.state.model == OTHER)


async def test_draining_agent_does_not_swap(rig: AgentRig):
    rig.state.draining = True
    async with following(rig):
        rig.residency.plan_changed(a_plan(OTHER))
        await eventually(lambda: rig.state.order.queues != ())
    assert rig.engine.activations == []


async def test_failed_activation_is_retried_without_serving(rig: AgentRig):
    """The previous model may no longer be active: its requests must not fail on the engine."""
    rig.engine.fail_activate = [EngineError("no memory"), EngineError("no memory")]
    async with following(rig):
        rig.residency.plan_changed(a_plan(OTHER))
        await eventually(lambda: rig.state.model is None)
        await eventually(lambda: rig.state.model == OTHER)
    assert rig.engine.activations == [OTHER]


async def test_failed_activations_let_the_previous_model_serve_longer(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    """Each failed attempt drains the instance, so the pause between attempts grows."""
    tried: list[float] = []

    async def refuse(_model: ModelName) -> float:
        tried.append(rig.clock.now())
        raise EngineError("no memory")

    monkeypatch.setattr(rig.engine, "activate", refuse)
    begun = rig.clock.now()
    async with following(rig):
        rig.residency.plan_changed(a_plan(OTHER, epoch=1))
        for second in range(200):
            rig.clock.advance(1.0)
            rig.residency.plan_changed(a_plan(OTHER, epoch=2 + second))
            await asyncio.sleep(0.012)
    pauses_s = [after - before for before, after in pairwise(tried)]

    assert rig.state.model == MODEL
    assert tried[0] <= begun + 3.0
    assert len(tried) <= 20
    assert 45.0 <= max(pauses_s) <= 75.0
    assert not rig.state.swapping


async def test_dead_engine_restarts_with_its_model(rig: AgentRig):
    rig.engine.fail_start = [EngineError("not yet"), EngineError("not yet")]
    rig.engine.die()
    async with following(rig):
        await eventually(lambda: rig.engine.activations == [MODEL])
        await eventually(lambda: not rig.state.swapping)
    assert (rig.engine.starts, rig.state.totals.crashes, rig.state.model) == (3, 1, MODEL)


async def test_engine_that_lost_its_model_follows_plans(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    activate = rig.engine.activate

    async def activate_other(model: ModelName) -> float:
        if model == MODEL:
            raise EngineError("no such weights")
        return await activate(model)

    monkeypatch.setattr(rig.engine, "activate", activate_other)
    rig.engine.die()
    async with following(rig):
        await eventually(lambda: rig.engine.starts > 0)
        rig.residency.plan_changed(a_plan(OTHER))
        await eventually(lambda: rig.state.model == OTHER)
    assert rig.state.totals.crashes == 1


async def test_lost_model_is_retried_without_a_plan(rig: AgentRig):
    rig.engine.fail_activate = [EngineError("no memory"), EngineError("no memory")]
    rig.engine.die()
    async with following(rig):
        await eventually(lambda: rig.engine.activations == [MODEL])
        await eventually(lambda: rig.state.model == MODEL)


async def test_window_is_handed_back_when_the_engine_dies(rig: AgentRig):
    await rig.hold(a_request("waiting"))
    rig.engine.fail_start = [EngineError("not yet")] * 1000
    rig.engine.die()
    async with following(rig):
        await eventually(lambda: rig.engine.starts == 1)
        assert len(rig.state.window) == 0
        assert (await rig.requeued(RESUME)).request_id == "waiting"


async def test_request_survives_the_engines_death(rig: AgentRig):
    """The request is requeued to its resume queue, and a new engine serves it."""
    run, task = await rig.running(a_request("r"))
    rig.engine.emit("r", 20)
    await eventually(lambda: run.answer.token_ids == [20])
    rig.engine.die()
    await task
    rig.residency.noticed(RESUME)
    async with following(rig), admitting(rig), working(rig.puller.work(rig.stop), rig):
        await rig.engine.began("r")
        assert rig.engine.requests[run.request.request_id].progress == (20,)
        rig.engine.emit("r", 21, finish=FinishReason.LENGTH)
        await eventually(lambda: rig.state.totals.completed == 1)
    assert await rig.back_in_lane(RESUME) == 0


async def test_sources_are_the_existing_queues_that_the_plan_names(rig: AgentRig):
    chat, best_effort = lane_of(), lane_of(BEST_EFFORT)
    plan = a_plan(MODEL, lanes=(chat.queue_name, best_effort.queue_name))
    queues = (chat.queue_name, chat.overflow_name, best_effort.resume_name, relegated_name(MODEL))
    foreign = lane_of(model=OTHER).queue_name
    rig.residency.plan_changed(replace(plan, work_queues=(*queues, foreign)))
    async with following(rig):
        await eventually(lambda: chat.queue_name in rig.state.order.queues)
    assert set(rig.state.order.queues) == {
        inbox_name("i1"),
        best_effort.queue_name,
        *queues,
    }


async def test_noticed_queues_of_the_active_model_are_also_sources(rig: AgentRig):
    batch, foreign = lane_of(BATCH), lane_of(model=OTHER)
    async with following(rig):
        for queue in (batch.overflow_name, RESUME, foreign.queue_name, "headway.other"):
            rig.residency.noticed(queue)
        await eventually(lambda: RESUME in rig.state.order.queues)
    assert set(rig.state.order.queues) == {batch.overflow_name, RESUME, inbox_name("i1")}


async def test_retired_queue_is_polled_again_after_a_notice_only(rig: AgentRig):
    lane = lane_of().queue_name
    rig.residency.noticed(lane)
    async with following(rig):
        await eventually(lambda: lane in rig.state.order.queues)

    rig.residency.retiring((lane,))
    assert lane not in polled(rig, after_s=10.0)
    rig.residency.retired(deleted=(lane,), kept=())
    assert lane not in polled(rig, after_s=300.0)
    rig.residency.noticed(lane)
    assert lane in polled(rig, after_s=1.0)


async def test_queue_that_the_leader_keeps_is_polled_again(rig: AgentRig):
    lane = lane_of().queue_name
    rig.residency.noticed(lane)
    async with following(rig):
        await eventually(lambda: lane in rig.state.order.queues)
    rig.residency.retiring((lane,))
    rig.residency.retired(deleted=(), kept=(lane,))
    assert lane in polled(rig, after_s=1.0)


def polled(rig: AgentRig, *, after_s: float) -> set[str]:
    """Queues that the agent polls once each, *after_s* from now."""
    now, order, queues = rig.clock.now() + after_s, rig.state.order, set[str]()
    while (source := order.next(now, best_effort_room=True)) is not None:
        queues.add(source.queue)
        order.empty(source.queue, now)
    return queues


@pytest.mark.parametrize("queue", ["lane.1.tiny-llama.x", "overflow.", "resume.1.tiny-llama.soon"])
async def test_notice_of_an_invalid_queue_is_refused(rig: AgentRig, queue: str):
    """The agent would fail when it computes a deadline from an invalid queue name."""
    with pytest.raises(ContractError):
        rig.residency.noticed(queue)
    assert rig.state.noticed == {}


async def test_plans_are_followed_after_a_swap(rig: AgentRig):
    async with following(rig):
        for number, model in enumerate((OTHER, MODEL, OTHER), start=1):
            rig.residency.plan_changed(a_plan(model, epoch=number))
            await eventually(lambda model=model: rig.state.model == model)
    assert rig.engine.activations == [OTHER, MODEL, OTHER]


@pytest.mark.parametrize(
    ("output_tokens", "linear_s", "evicted"),
    [(400, 0.0001, 1), (2, 0.05, 0)],
    ids=["much to do, little to compute again", "nearly done"],
)
async def test_swap_drains_or_evicts_whichever_is_predicted_cheaper(
    registry: ModelRegistry,
    tokenizers: dict[ModelName, Tokenizer],
    output_tokens: int,
    linear_s: float,
    evicted: int,
):
    """The drain limit is 60 s, so that the predicted costs decide."""
    async with open_agent(registry, tokenizers, swap_drain_s=60.0) as rig:
        rig.state.profiles[MODEL] = Profile(
            model=MODEL,
            engine="scripted",
            device="paper",
            version=1,
            at=0.0,
            latency=LatencyCoefficients(constant_s=0.01, linear_s=linear_s),
        )
        ran, task = await rig.running(a_request("r", sampling=sampling(output_tokens)))
        rig.engine.emit("r", 20)
        await eventually(lambda: ran.answer.begun)
        async with following(rig):
            rig.residency.plan_changed(a_plan(OTHER))
            if not evicted:
                await eventually(lambda: rig.state.swapping)
                rig.engine.emit("r", 21, finish=FinishReason.LENGTH)
            await eventually(lambda: rig.state.model == OTHER)
        await task
        assert rig.state.totals.evicted == evicted
        assert rig.state.totals.completed == 1 - evicted
