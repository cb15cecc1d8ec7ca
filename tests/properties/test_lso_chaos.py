"""Every request gets one unchanged answer under arbitrary operations in arbitrary order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.settings import LsoSettings, PullSettings
from shared.broker import topology
from shared.broker.protocol import BindingSpec
from shared.contracts.base import Decoder, ModelName, RequestId
from shared.contracts.control import LsoOutcome
from shared.contracts.lanes import LaneKey, relegated_name
from shared.contracts.requests import QueuedRequest, Reply, RequestCompleted, RequestFailed, Tokens
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.models.tokenizer import Tokenizer
from shared.runtime.tasks import every
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
    SwapIn,
    SwapOut,
    Warm,
)
from tests.brokers import eventually
from tests.queued import BATCH, BEST_EFFORT, CHAT, MODEL, OTHER, a_request, lane_of, sampling
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import REPLY, AgentRig, open_agent
from tests.virtual_time import LoopClock, run_virtually

NUM_REQUESTS = 24
CLASSES = (CHAT, BATCH, BEST_EFFORT)
SIMULATED = SimulatedSettings(
    time_scale=1.0,
    max_running=6,
    kv_capacity_tokens=512,
    cold_activation_s=0.06,
    warm_activation_s=0.03,
)
decode_reply: Decoder[Reply] = Decoder(Reply)

Order = tuple[int, int, float]
"""Kind of operation, index of the request, and delay after the previous operation."""
orders = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, NUM_REQUESTS - 1), st.floats(0, 0.05)),
    min_size=10,
    max_size=40,
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path_factory.mktemp("models"), weights=False))


@pytest.fixture(scope="module")
def tokenizers(registry: ModelRegistry) -> dict[ModelName, Tokenizer]:
    return {name: Tokenizer.load(Path(registry.entry(name).path)) for name in registry.bases}


@pytest.fixture(scope="module")
def undisturbed(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
) -> dict[RequestId, Tokens]:
    """The answers without operations."""
    return run_virtually(served(registry, tokenizers, []))


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


def operation(kind: int, name: RequestId) -> Lso:
    model = MODEL if kind % 2 else OTHER
    return (
        Evict(request_ids=(name,)),
        SwapOut(request_id=name),
        SwapOut(request_id=name, rest_s=0.05),
        SwapIn(request_id=name),
        Checkpoint(request_id=name),
        ClearCaches(),
        Pull(count=2),
        Preempt(),
        Activate(model=model),
        Warm(model=model),
        Cool(model=model),
        SetScheduling(token_budget=16 + 8 * len(name), max_running=2 + len(name)),
    )[kind]


@asynccontextmanager
async def serving(rig: AgentRig) -> AsyncIterator[None]:
    """All loops of an agent, which receives notices; at the end, pulling is stopped."""
    stopped = asyncio.Event()
    notices = topology.private_queue("agent.notices")
    await rig.broker.declare_queue(notices)
    await rig.broker.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=notices.name, routing_key=topology.CONTROL_LANE
        )
    )
    await rig.broker.consume(notices.name, rig.handler.handle, prefetch=64)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.residency.work(rig.stop))
        tasks.create_task(rig.admission.work(rig.stop, tasks))
        tasks.create_task(rig.puller.work(rig.stop))
        tasks.create_task(every(0.01, rig.leases.check, stop=stopped))
        tasks.create_task(every(0.02, rig.outbox.flush_all, stop=stopped))
        yield
        rig.stop.set()
        stopped.set()
        rig.state.wake()


async def served(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer], chaos: list[Order]
) -> dict[RequestId, Tokens]:
    """
    Serve the whole load through one agent while *chaos* orders operations.

    Check that each request is answered exactly once and that no messages, runs or KV remain.
    """
    clock = LoopClock()
    engine = SimulatedEngine([registry.entry(MODEL), registry.entry(OTHER)], SIMULATED, clock)
    await engine.start()
    async with open_agent(
        registry,
        tokenizers,
        engine=engine,
        clock=clock,
        pull=PullSettings(window=8, poll_s=0.05, evict_hold_s=0.01),
        lso=LsoSettings(swap_lease_s=0.1),
        evict_hold_s=0.01,
        swap_drain_s=0.05,
    ) as rig:
        rig.state.model = None
        load = requests(clock.now())
        answers: dict[RequestId, Tokens] = {}
        async with serving(rig):
            for request in load:
                await rig.put(request)
            plans = asyncio.create_task(alternate(rig, load))
            ordered = []
            for kind, number, after_s in chaos:
                ordered.append(rig.executor.start(operation(kind, a_name(rig, load, number))))
                await asyncio.sleep(after_s)
            async with asyncio.timeout(30):
                while len(answers) < len(load):
                    await collect(rig, answers)
                    await asyncio.sleep(0.01)
            plans.cancel()
            for task in ordered:
                assert task is not None
                for result in await task:
                    assert result.outcome is not LsoOutcome.FAILED, result.message
            await eventually(lambda: not rig.state.runs)
        await collect(rig, answers)
        await nothing_left(rig, engine, load)
        await engine.close()
    return answers


def a_name(rig: AgentRig, load: list[QueuedRequest], number: int) -> RequestId:
    """
    Id of a request that runs or is swapped out on the agent.

    If there is none, the id of any request of the load; the agent then rejects the operation.
    """
    here = [*rig.state.runs, *rig.state.swapped_out]
    return here[number % len(here)] if here else load[number].request_id


async def alternate(rig: AgentRig, load: list[QueuedRequest]) -> None:
    """Publish plans that serve the two models in turn."""
    for epoch in count(1):
        active = MODEL if epoch % 2 else OTHER
        lanes = {request.lane for request in load if request.model.base == active}
        rig.residency.plan_changed(a_plan(active, epoch=epoch, lanes=tuple(sorted(lanes))))
        await asyncio.sleep(0.4)


async def collect(rig: AgentRig, answers: dict[RequestId, Tokens]) -> None:
    """Collect finals into *answers*; fail at a second final of a request."""
    while (delivery := await rig.far.get(REPLY)) is not None:
        reply = decode_reply(delivery.body)
        assert not isinstance(reply, RequestFailed), reply.error
        if isinstance(reply, RequestCompleted):
            assert reply.request_id not in answers, "answered twice"
            answers[reply.request_id] = reply.token_ids


async def nothing_left(rig: AgentRig, engine: SimulatedEngine, load: list[QueuedRequest]) -> None:
    state, snapshot = rig.state, engine.snapshot()
    assert (state.runs, state.pulled, state.swapped_out) == ({}, {}, {})
    assert (snapshot.running, snapshot.waiting, snapshot.kv_utilization) == (0, 0, 0.0)
    await rig.broker.close()
    queues = {relegated_name(MODEL), relegated_name(OTHER)}
    for request in load:
        queues |= {request.lane, LaneKey.parse(request.lane).resume_name}
    assert {queue: n for queue in sorted(queues) if (n := await rig.far.ready(queue))} == {}


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chaos=orders)
def test_random_operations_do_not_lose_duplicate_or_change_an_answer(
    registry: ModelRegistry,
    tokenizers: dict[ModelName, Tokenizer],
    undisturbed: dict[RequestId, Tokens],
    chaos: list[Order],
):
    assert run_virtually(served(registry, tokenizers, chaos)) == undisturbed
