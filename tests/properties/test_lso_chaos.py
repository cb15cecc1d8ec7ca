"""Every request gets one unchanged answer under arbitrary operations in arbitrary order."""

import asyncio
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ops.sim.virtual_time import LoopClock, run_virtually
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.settings import LsoSettings, PullSettings
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import Decoder, Message, RequestId, encode
from shared.contracts.control import (
    EvictRequest,
    LsoActivate,
    LsoAnswered,
    LsoCheckpoint,
    LsoClear,
    LsoCommand,
    LsoOutcome,
    LsoPreempt,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
)
from shared.contracts.lanes import LaneKey, relegated_name
from shared.contracts.requests import QueuedRequest, RequestCompleted, RequestFailed, Tokens
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.agents.plans import a_plan
from tests.agents.rig import I1, REPLY, AgentRig, open_agent
from tests.brokers import eventually
from tests.queued import BATCH, BEST_EFFORT, CHAT, MODEL, OTHER, a_request, lane_of, sampling

NUM_REQUESTS = 24
CLASSES = (CHAT, BATCH, BEST_EFFORT)
SIMULATED = SimulatedSettings(
    time_scale=1.0,
    max_running=6,
    kv_capacity_tokens=512,
    cold_activation_s=0.06,
    warm_activation_s=0.03,
)
ANSWERS = "answers-of-the-test"
decode_answer: Decoder[LsoAnswered] = Decoder(LsoAnswered)

Order = tuple[int, int, float]
"""Kind of operation, index of the request, and delay after the previous operation."""
orders = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, NUM_REQUESTS - 1), st.floats(0, 0.05)),
    min_size=10,
    max_size=40,
)


@pytest.fixture(scope="module")
def registry_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)


@pytest.fixture(scope="module")
def registry(registry_path: Path) -> ModelRegistry:
    return ModelRegistry.load(registry_path)


@pytest.fixture(scope="module")
def undisturbed(registry: ModelRegistry, registry_path: Path) -> dict[RequestId, Tokens]:
    """The answers without operations."""
    return run_virtually(served(registry, registry_path, []))


def requests(now: float) -> list[QueuedRequest]:
    random = Random(7)
    made = []
    for number in range(NUM_REQUESTS):
        base = MODEL if number % 3 else OTHER
        slo = CLASSES[number % len(CLASSES)]
        length = random.randrange(4, 60)
        prompt = tuple(random.randrange(10, 500) for _ in range(length))
        made.append(
            a_request(
                f"r{number}",
                base=base,
                slo=slo,
                prompt=prompt,
                prompt_tokens=length,
                sampling=sampling(random.randrange(2, 60)),
                arrived_at=now,
                lane=lane_of(slo, model=base, arrived_at=now).queue_name,
                reply_to=REPLY,
            )
        )
    return made


def operation(kind: int, name: RequestId, command_id: str) -> LsoCommand:
    model = MODEL if kind % 2 else OTHER
    to: dict[str, Any] = {"instance_id": I1, "command_id": command_id, "reply_to": ANSWERS}
    orders: tuple[LsoCommand, ...] = (
        EvictRequest(request_id=name, **to),
        LsoSwapOut(request_id=name, **to),
        LsoSwapOut(request_id=name, rest_s=0.05, **to),
        LsoSwapIn(request_id=name, **to),
        LsoCheckpoint(request_id=name, **to),
        LsoClear(**to),
        LsoPull(count=2, **to),
        LsoPreempt(**to),
        LsoActivate(model=model, **to),
        LsoWarm(model=model, **to),
        LsoSet(token_budget=16 + 8 * len(name), max_running=2 + len(name), **to),
    )
    return orders[kind]


async def served(
    registry: ModelRegistry, registry_path: Path, chaos: list[Order]
) -> dict[RequestId, Tokens]:
    """
    Serve the whole load through one agent while *chaos* orders operations.

    Check that each request and each order is answered exactly once, and that no messages, runs or
    KV remain.
    """
    clock = LoopClock()
    engine = SimulatedEngine([registry.entry(MODEL), registry.entry(OTHER)], SIMULATED, clock)
    await engine.start()
    async with open_agent(
        registry,
        registry_path,
        engine=engine,
        clock=clock,
        initial_model=None,
        pull=PullSettings(window=8, poll_s=0.05, evict_hold_s=0.01),
        lso=LsoSettings(swap_lease_s=0.1),
        swap_drain_s=0.05,
    ) as rig:
        spec, binding = topology.reply_queue(ANSWERS)
        await rig.far.declare_queue(spec)
        await rig.far.bind(binding)
        load = requests(clock.now())
        answers: dict[RequestId, Tokens] = {}
        outcomes: dict[str, LsoOutcome] = {}
        for request in load:
            await rig.put(request)
        plans = asyncio.create_task(alternate(rig, load))
        for number, (kind, index, after_s) in enumerate(chaos):
            order = operation(kind, a_name(rig, load, index), f"c{number}")
            await publish(rig, topology.CONTROL, topology.command_instance(I1), order)
            await asyncio.sleep(after_s)
        async with asyncio.timeout(30):
            while len(answers) < len(load) or len(outcomes) < len(chaos):
                await collect(rig, answers, outcomes)
                await asyncio.sleep(0.01)
        plans.cancel()
        await eventually(lambda: rig.instance.requests.is_empty)
        await collect(rig, answers, outcomes)
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.kv_utilization) == (0, 0, 0.0)
        queues = {relegated_name(MODEL), relegated_name(OTHER)}
        for request in load:
            queues |= {request.lane, LaneKey.parse(request.lane).resume_name}
        assert [queue for queue in sorted(queues) if not await rig.is_empty(queue)] == []
        assert LsoOutcome.FAILED not in outcomes.values()
    await engine.close()
    return answers


def a_name(rig: AgentRig, load: list[QueuedRequest], number: int) -> RequestId:
    """Id of a request that runs or is swapped out on the agent; without any, one of the load."""
    held = rig.instance.requests
    here = [*held.runs, *held.swapped_out]
    return here[number % len(here)].request_id if here else load[number].request_id


async def publish(rig: AgentRig, exchange: str, key: str, message: Message) -> None:
    await rig.far.publish(exchange, key, OutMessage(body=encode(message), persistent=False))


async def alternate(rig: AgentRig, load: list[QueuedRequest]) -> None:
    """Publish plans that serve the two models in turn."""
    for epoch in count(1):
        active = MODEL if epoch % 2 else OTHER
        lanes = {request.lane for request in load if request.model.base == active}
        plan = a_plan(active, epoch=epoch, lanes=tuple(sorted(lanes)))
        await publish(rig, topology.PLANS, I1, plan)
        await asyncio.sleep(0.4)


async def collect(
    rig: AgentRig, answers: dict[RequestId, Tokens], outcomes: dict[str, LsoOutcome]
) -> None:
    """Collect finals and answers to orders; fail at the second of a request or an order."""
    for reply in await rig.replies():
        assert not isinstance(reply, RequestFailed), reply.error
        if isinstance(reply, RequestCompleted):
            assert reply.request_id not in answers, "answered twice"
            answers[reply.request_id] = reply.token_ids
    while (delivery := await rig.far.get(ANSWERS)) is not None:
        answered = decode_answer(delivery.body)
        assert answered.command_id not in outcomes, "answered twice"
        outcomes[answered.command_id] = answered.outcome


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chaos=orders)
def test_random_operations_do_not_lose_duplicate_or_change_an_answer(
    registry: ModelRegistry,
    registry_path: Path,
    undisturbed: dict[RequestId, Tokens],
    chaos: list[Order],
):
    assert run_virtually(served(registry, registry_path, chaos)) == undisturbed
