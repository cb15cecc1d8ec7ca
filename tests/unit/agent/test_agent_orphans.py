"""Instances without a plan: which models they activate, and when."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest

from services.agent.orphans import LEAST_WAIT_S, LOOK_PERIOD_S, WAIT_SPREAD_S
from shared.broker import topology
from shared.broker.protocol import QueueDepth
from shared.contracts.base import ModelName
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.lanes import relegated_name
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from tests.brokers import eventually
from tests.clocks import FakeClock
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.agent.parts import PATIENCE_S, AgentParts
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import AgentRig
from tests.unit.agent.tasks import working

pytestmark = pytest.mark.virtual_time

MOST_WAIT_S = LEAST_WAIT_S + WAIT_SPREAD_S
STEP_S = 0.25


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.agent.residency.CHECK_PERIOD_S", 0.005)
    monkeypatch.setattr("services.agent.orphans.PERIOD_S", 0.005)


@asynccontextmanager
async def following(rig: AgentRig) -> AsyncIterator[None]:
    """Run the loops of a service."""
    async with (
        working(rig.residency.work(rig.stop), rig),
        working(rig.orphanhood.watch(rig.stop), rig),
    ):
        yield


async def spend(
    clock: FakeClock, seconds: float, until: Callable[[], bool] = lambda: False
) -> None:
    """Advance the clock in small steps."""
    for _ in range(round(seconds / STEP_S)):
        if until():
            return
        clock.advance(STEP_S)
        await asyncio.sleep(0.02)


def stall(rig: AgentRig, seconds: float) -> None:
    rig.clock.advance(seconds)
    rig.stall_clock.advance(seconds)


async def put_work(rig: AgentRig, model: ModelName = OTHER) -> str:
    """Put work for *model* into a queue, with a notice."""
    lane = lane_of(model=model).queue_name
    await rig.put(a_request(base=model, lane=lane))
    rig.residency.noticed(lane)
    return lane


async def looks(rig: AgentRig, seconds: float) -> ModelName | None:
    """First model that `look` returns within *seconds*; None if it returns no model."""
    for _ in range(round(seconds / LOOK_PERIOD_S)):
        if (model := await rig.orphanhood.look()) is not None:
            return model
        rig.clock.advance(LOOK_PERIOD_S)
    return None


async def test_agent_without_a_model_follows_notices_at_once(rig: AgentRig):
    rig.state.model = None
    async with following(rig):
        rig.residency.noticed(lane_of(model=OTHER).queue_name)
        await eventually(lambda: rig.state.model == OTHER)
    assert rig.state.totals.swaps == 0


async def test_work_of_another_model_is_served_after_the_patience(rig: AgentRig):
    await put_work(rig)
    async with following(rig):
        await spend(rig.clock, PATIENCE_S - 0.5)
        assert rig.state.model == MODEL
        await spend(rig.clock, MOST_WAIT_S + 5.0, until=lambda: rig.state.model == OTHER)
        await eventually(lambda: rig.state.model == OTHER)
        await eventually(lambda: not rig.state.swapping)
    assert rig.engine.activations == [OTHER]


async def test_stale_plan_is_not_waited_for(rig: AgentRig):
    rig.residency.plan_changed(a_plan(MODEL))
    await put_work(rig)
    async with following(rig):
        await spend(rig.clock, PATIENCE_S + MOST_WAIT_S + 5.0, lambda: rig.state.model == OTHER)
        await eventually(lambda: rig.state.model == OTHER)


async def test_busy_agent_keeps_its_model(rig: AgentRig):
    await rig.hold(a_request("r"))
    await put_work(rig)
    async with following(rig):
        await spend(rig.clock, 2 * PATIENCE_S)
    assert rig.engine.activations == []


async def test_work_that_arrived_and_ended_between_two_checks_counts(rig: AgentRig):
    rig.clock.advance(PATIENCE_S)
    assert rig.orphanhood.is_alone()
    rig.state.totals.pull(lane_of().queue_name, rig.clock.now())
    assert not rig.orphanhood.is_alone()


async def test_notice_of_an_empty_queue_causes_no_swap(rig: AgentRig):
    await topology.declare_work_queue(rig.far, lane_of(model=OTHER).queue_name)
    async with following(rig):
        rig.residency.noticed(lane_of(model=OTHER).queue_name)
        rig.residency.noticed(lane_of(model=OTHER).resume_name)
        await spend(rig.clock, PATIENCE_S + MOST_WAIT_S + 5.0)
    assert rig.engine.activations == []


async def test_plan_does_not_age_while_the_process_is_stalled(rig: AgentRig):
    rig.residency.plan_changed(a_plan(MODEL))
    async with following(rig):
        await spend(rig.clock, 1.0)
        await put_work(rig)
        stall(rig, 14.0)
        await spend(rig.clock, PATIENCE_S - 2.0)
        assert rig.orphanhood.has_plan()
    assert rig.engine.activations == []


async def test_plan_time_after_a_stall_is_not_in_the_future(rig: AgentRig):
    rig.orphanhood.attend()
    stall(rig, 14.0)
    rig.residency.plan_changed(a_plan(MODEL))
    assert rig.orphanhood.has_plan()
    assert rig.state.plan_at == rig.clock.now()


async def test_plan_does_not_age_without_a_connection(rig: AgentRig):
    rig.residency.plan_changed(a_plan(MODEL))
    await put_work(rig)
    async with following(rig):
        rig.broker.lose_connection()
        await spend(rig.clock, PATIENCE_S + MOST_WAIT_S + 5.0)
        rig.broker.reconnect()
        await spend(rig.clock, PATIENCE_S - 1.0)
    assert rig.engine.activations == []


async def test_patience_restarts_after_an_unnoticed_connection_loss(rig: AgentRig):
    rig.clock.advance(PATIENCE_S)
    assert rig.orphanhood.is_alone()
    rig.broker.drop_connection()
    assert not rig.orphanhood.is_alone()
    rig.clock.advance(PATIENCE_S)
    assert rig.orphanhood.is_alone()


async def test_swap_is_followed_by_the_full_patience(rig: AgentRig):
    """Work of two models waits throughout the test, and no instance pulls it."""
    swapped_at: list[float] = []
    activate = rig.engine.activate

    async def activated(model: ModelName) -> float:
        swapped_at.append(rig.clock.now())
        return await activate(model)

    rig.engine.activate = activated  # type: ignore[method-assign]
    for model in (MODEL, OTHER):
        await put_work(rig, model)
    async with following(rig):
        for second in range(40):
            rig.residency.noticed(lane_of(model=(MODEL, OTHER)[second % 2]).queue_name)
            await spend(rig.clock, 1.0)
    assert 2 <= len(swapped_at) <= 4
    assert all(b - a >= PATIENCE_S for a, b in pairwise(swapped_at))


async def test_work_found_by_a_single_check_does_not_cause_a_swap(rig: AgentRig):
    lane = await put_work(rig)
    assert await rig.orphanhood.look() is None
    rig.clock.advance(LEAST_WAIT_S - 0.1)
    assert await rig.orphanhood.look() is None
    await rig.far.take(lane)
    assert await looks(rig, 5.0) is None


async def test_wrong_count_only_delays_a_swap(rig: AgentRig, monkeypatch: pytest.MonkeyPatch):
    """A wrong count is 0: RabbitMQ reports a queue that does not answer in time as empty."""
    await put_work(rig)
    counts = iter([1, 1, 0])
    depth = rig.broker.depth

    async def counted(queue: str) -> QueueDepth | None:
        ready = next(counts, None)
        return await depth(queue) if ready is None else QueueDepth(ready=ready, consumers=0)

    monkeypatch.setattr(rig.broker, "depth", counted)
    assert await looks(rig, 1.5) is None
    assert await looks(rig, MOST_WAIT_S + 1.0) == OTHER


async def test_count_is_repeated_if_the_broker_does_not_answer(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    await put_work(rig)

    async def away(_queue: str) -> QueueDepth | None:
        raise BrokerUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(rig.broker, "depth", away)
        assert await looks(rig, 5.0) is None
    assert await looks(rig, MOST_WAIT_S + 1.0) == OTHER


async def test_only_one_instance_at_a_time_claims_a_model(rig: AgentRig):
    claim = topology.claim_queue(OTHER)
    await rig.far.declare_queue(claim)
    async with rig.orphanhood.claim(OTHER) as is_ours:
        assert not is_ours
    async with rig.orphanhood.claim(MODEL) as is_ours:
        assert is_ours
    await rig.far.delete_queue(claim.name)
    async with rig.orphanhood.claim(OTHER) as is_ours:
        assert is_ours
    assert await rig.far.depth(claim.name) is None


async def test_one_of_three_idle_agents_serves_waiting_work(
    rig: AgentRig, registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
):
    """An activation takes longer than the difference of the agents' waiting times."""
    parts: list[AgentParts] = [rig]
    async with AsyncExitStack() as stack:
        for name in ("i2", "i3"):
            broker = await stack.enter_async_context(UnreliableBroker(rig.hub))
            parts.append(
                AgentParts(
                    broker=broker,
                    registry=registry,
                    tokenizers=tokenizers,
                    clock=rig.clock,
                    instance_id=name,
                )
            )
        lane = await put_work(rig)
        loaded = asyncio.Event()
        for part in parts:
            part.residency.noticed(lane)
            slow(part, loaded)
            stack.callback(part.stop.set)
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(part.residency.work(part.stop))
                tasks.create_task(part.puller.work(part.stop))
            await spend(rig.clock, PATIENCE_S + 3 * MOST_WAIT_S)
            assert sum(part.state.swapping for part in parts) == 1
            loaded.set()
            for part in parts:  # the request is late by now, and is relegated
                part.residency.noticed(relegated_name(OTHER))
            await eventually(lambda: sum(part.state.num_waiting for part in parts) == 1)
            await spend(rig.clock, 3 * MOST_WAIT_S)
            for part in parts:
                part.stop.set()
                part.state.wake()
    assert sorted(part.engine.activations for part in parts) == [[], [], [OTHER]]


def slow(part: AgentParts, loaded: asyncio.Event) -> None:
    """Delay activation until the event *loaded* is set."""
    activate = part.engine.activate

    async def activated(model: ModelName) -> float:
        await loaded.wait()
        return await activate(model)

    part.engine.activate = activated  # type: ignore[method-assign]
