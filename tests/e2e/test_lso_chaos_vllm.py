"""Every request gets one unchanged answer under random operators' commands to two real engines."""

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from services.agent.cli import next_status
from services.agent.verbs.cli_lso import order
from services.mesh.processes import ProcessMesh
from shared.broker.protocol import Broker
from shared.contracts.base import InstanceId, ModelName, RequestId
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
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.contracts.telemetry import InstanceStatus
from shared.producer.producer import Producer
from tests.e2e.meshes import (
    LLAMA,
    QWEN,
    Answer,
    ask_all,
    assert_consistent,
    mesh_spec,
    only_left,
    producer_of,
    read,
)
from tests.e2e.meshes import request as asked

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]

MODELS = (LLAMA, "tiny-llama-b", QWEN)
"""Models: the second can reuse the first model's engine, the third needs its own engine."""
AGENTS = (InstanceId("a0"), InstanceId("a1"))
NUM_REQUESTS = 150
STORM_S = 60.0
PATIENCE_S = 480.0
"""Time limit of all answers, which take two minutes on a quiet machine."""
PAUSE_S = 0.15
"""Pause between commands."""
ENGINE = {"engine": {"vllm": {"max_running": 24, "prefix_caching": True}}}
MUST_HAPPEN = {
    "lso.evict.v1", "lso.swap_out.v1", "lso.activate.v1", "lso.clear.v1", "lso.set.v1",
}  # fmt: skip
"""Operations that succeed at least once a minute on any machine; pulls may find no work."""


def bodies() -> list[InferenceRequest]:
    return [
        asked(n, model=MODELS[n // 10 % len(MODELS)], max_tokens=150 + 37 * n % 350)
        for n in range(NUM_REQUESTS)
    ]


class Storm:
    """
    Sends random commands to both agents.

    Args:
        broker: Connection that only the storm uses.
        known: Ids of requests, to which the test adds during the storm.
    """

    def __init__(self, broker: Broker, known: list[RequestId]) -> None:
        self._broker = broker
        self._known = known
        self._chance = Random(5)
        self.done: Counter[str] = Counter()
        self.failed: list[LsoAnswered] = []
        self.num_orders = 0
        self.num_lost = 0
        """Number of commands that timed out at the broker because the machine stalled."""

    async def rage(self) -> None:
        """Send commands until cancelled, without waiting for their answers."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._order(self._command()))
                await asyncio.sleep(PAUSE_S)

    async def _order(self, command: LsoCommand) -> None:
        self.num_orders += 1
        try:
            answer = await order(self._broker, command, timeout_s=30.0)
        except BrokerUnavailableError:
            self.num_lost += 1
            return
        if not isinstance(answer, LsoAnswered):
            return
        if answer.outcome is LsoOutcome.DONE:
            self.done[str(type(command).__struct_config__.tag)] += 1
        elif answer.outcome is LsoOutcome.FAILED:
            self.failed.append(answer)

    def _command(self) -> LsoCommand:
        chance, to = self._chance, self._chance.choice(AGENTS)
        request_id = chance.choice(self._known[-10:])
        model = ModelName(chance.choice(MODELS))
        commands: tuple[LsoCommand, ...] = (
            EvictRequest(instance_id=to, request_id=request_id),
            EvictRequest(instance_id=to, request_id=request_id),
            LsoSwapOut(instance_id=to, request_id=request_id),
            LsoSwapOut(instance_id=to, request_id=request_id, rest_s=0.5),
            LsoSwapIn(instance_id=to, request_id=request_id),
            LsoCheckpoint(instance_id=to, request_id=request_id),
            LsoPreempt(instance_id=to),
            LsoPreempt(instance_id=to),
            LsoPull(instance_id=to, count=2),
            LsoSet(instance_id=to, token_budget=chance.choice((64, 256, 2048))),
            LsoClear(instance_id=to),
            LsoWarm(instance_id=to, model=model),
            LsoActivate(instance_id=to, model=model),
        )
        return chance.choice(commands)


async def test_random_commands_lose_duplicate_and_change_no_answer(
    vllm_broker: str, tmp_path: Path
) -> None:
    spec = mesh_spec(
        vllm_broker, tmp_path, engine="vllm", agents=len(AGENTS), agent_settings=ENGINE
    )
    requests = bodies()
    async with (
        ProcessMesh(spec) as mesh,
        producer_of(mesh) as producer,
        mesh.open_broker("headway-storm") as broker,
    ):
        calm = await ask_all(producer, requests, timeout_s=PATIENCE_S)
        known = [RequestId("nothing-like-it")]
        storm = Storm(broker, known)
        raging = asyncio.create_task(storm.rage(), name="storm")
        stormy = await ask_slowly(producer, requests, known)
        raging.cancel()
        await asyncio.wait([raging])
        # No error has ended the storm before its cancellation.
        assert raging.cancelled()
        after = [await rested(broker, agent) for agent in AGENTS]
        await only_left(broker, mesh, {})

    assert [RequestCompleted] * NUM_REQUESTS == [type(answer.final) for answer in stormy]
    assert [a.token_ids for a in calm] == [a.token_ids for a in stormy]
    for answer in stormy[1::2]:
        assert_consistent(answer)
    assert storm.failed == []
    assert set(storm.done) >= MUST_HAPPEN
    assert storm.num_lost < storm.num_orders / 2
    assert all(map(is_at_rest, after))


async def ask_slowly(
    producer: Producer, requests: list[InferenceRequest], known: list[RequestId]
) -> list[Answer]:
    """Send *requests* over the storm's duration, add ids to *known*, return all answers."""

    async def one(number: int, body: InferenceRequest) -> Answer:
        await asyncio.sleep(number * STORM_S / NUM_REQUESTS)
        mode = ReplyMode.STREAM if number % 2 else ReplyMode.FINAL
        generation = await producer.submit(body, reply=mode)
        known.append(generation.request_id)
        return await read(generation)

    async with asyncio.timeout(PATIENCE_S):
        return list(await asyncio.gather(*(one(n, body) for n, body in enumerate(requests))))


async def rested(broker: Broker, agent: InstanceId) -> InstanceStatus:
    """Wait until the instance is idle with cleared caches; return its status."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            # the broker may not answer for seconds; it recovers
            with suppress(BrokerUnavailableError):
                await order(broker, LsoClear(instance_id=agent), timeout_s=10.0)
                status = await next_status(broker, agent)
                if status is not None and is_at_rest(status):
                    return status
            await asyncio.sleep(PAUSE_S)


def is_at_rest(status: InstanceStatus) -> bool:
    """
    True if the instance has no requests, no KV and no activity after the last answer.

    Activity includes swaps and activations that the storm or a plan began.
    """
    held = status.running + status.waiting + status.swapped_out
    kv = status.kv_utilization + status.host_kv_bytes
    return held + kv == 0 and status.host_kv_capacity_bytes > 0
