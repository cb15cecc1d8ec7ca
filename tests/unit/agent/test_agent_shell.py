"""The shell: pulls, calls of the engine, claims, timers, and a lost connection."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from services.agent.runs import ADAPTER_WAIT_S
from services.agent.shell import MOST_EVENTS_AT_ONCE
from shared.broker import topology
from shared.broker.protocol import Delivery, OutMessage
from shared.contracts.control import LsoOutcome, LsoSwapOut, LsoWarm
from shared.contracts.errors import (
    BrokerConflictError,
    EngineError,
    MeshError,
    NoRoomError,
    QueueNotFoundError,
    UnsupportedError,
)
from shared.contracts.requests import FinishReason, ModelRef, QueuedRequest
from shared.models.registry import ModelRegistry, digest_of, write_registry
from shared.models.tiny import make_tiny_models
from solver.instance.commands import Command
from solver.instance.events import EngineDied, Event
from solver.instance.models import GRACE_S
from tests.agents.rig import I1, LANE, REPLY, RESUME, AgentRig, R, counted, open_agent
from tests.agents.scripted_engine import AbleEngine
from tests.brokers import eventually
from tests.queued import MODEL, OTHER, a_request

pytestmark = pytest.mark.virtual_time

LENGTH = FinishReason.LENGTH


async def put_bytes(rig: AgentRig, queue: str, body: bytes) -> None:
    """Publish a message whose body has another schema."""
    await topology.declare_work_queue(rig.far, queue)
    message = OutMessage(body=body, message_id="m1", reply_to=REPLY)
    await rig.far.publish(topology.LANES, queue, message)


@pytest.mark.parametrize(
    "body",
    [b"\xff", b"{}", b'{"kind": "request.queued.v9"}'],
    ids=["no JSON", "no kind", "unknown kind"],
)
async def test_undecodable_message_is_dead_lettered_with_a_reason(rig: AgentRig, body: bytes):
    await put_bytes(rig, LANE, body)
    await rig.running(a_request("r"))
    letter = await rig.far.take(topology.DEAD_LETTERS)
    failure = await rig.failed()
    rig.engine.emit("r", finish=LENGTH)

    assert (letter.body, letter.message_id, letter.reply_to) == (body, "m1", REPLY)
    assert str(letter.headers[topology.REASON_HEADER]).startswith("undecodable")
    assert (failure.request_id, failure.error.code) == ("m1", "dead_lettered")
    assert await rig.is_empty(LANE)


async def test_request_with_an_invalid_lane_is_dead_lettered(rig: AgentRig):
    await rig.put(a_request("bad", lane="no lane at all"), LANE)

    assert await rig.is_empty(LANE)
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1
    assert rig.engine.requests == {}


async def test_message_that_cannot_be_dead_lettered_returns_to_its_queue(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    async def forbidden(*_: object) -> None:
        raise BrokerConflictError("no exchange 'headway.replies'")

    monkeypatch.setattr(rig.broker, "publish", forbidden)
    await put_bytes(rig, RESUME, b"{}")
    await rig.put(a_request("theirs"), RESUME)
    await rig.running(a_request("mine"))

    assert not await rig.holds(RESUME)
    assert (await rig.far.take(RESUME)).body == b"{}"


@pytest.mark.parametrize("error", [BrokerConflictError("refused"), QueueNotFoundError("absent")])
async def test_queue_that_cannot_be_read_does_not_block_other_pulls(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch, error: MeshError
):
    """A notice leads to the next attempt."""
    get = rig.broker.get

    async def refuse(queue: str) -> Delivery | None:
        if queue == RESUME:
            raise error
        return await get(queue)

    with monkeypatch.context() as patched:
        patched.setattr(rig.broker, "get", refuse)
        await rig.put(a_request("theirs"), RESUME)
        await rig.running(a_request("mine"))
        await asyncio.sleep(5.0)
        assert await rig.far.ready(RESUME) == 1
    await rig.put(a_request("again"), RESUME)

    await rig.engine.began("theirs")
    await rig.engine.began("again")


async def test_pulls_continue_after_an_outage(rig: AgentRig):
    """Notices of the outage are lost, so all queues are asked again."""
    await rig.running(a_request("known"))
    rig.broker.lose_connection()
    await rig.put(a_request("r"))
    await asyncio.sleep(3.0)
    assert "r" not in rig.engine.requests

    rig.broker.reconnect()

    await rig.engine.began("r")


async def test_redelivered_copy_joins_its_run_and_is_acknowledged_once(rig: AgentRig):
    await rig.running(a_request("r", reply_to=REPLY))
    first = rig.engine.requests[R]
    rig.broker.drop_connection()
    assert not await rig.holds(LANE)
    await eventually(lambda: rig.holds(LANE))
    rig.engine.emit("r", 20, finish=LENGTH)
    await rig.completed()
    await asyncio.sleep(5.0)

    assert await rig.is_empty(LANE)
    assert rig.engine.requests[R] is first
    assert await rig.replies() == []
    assert (await rig.status()).totals.connections_lost == 1


@pytest.mark.parametrize("phase", ["running", "swapped out"])
async def test_bug_of_the_instance_ends_the_agent_and_returns_its_requests(
    registry: ModelRegistry, registry_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
):
    """A request is not acknowledged while it is swapped out, so a crash cannot lose it."""

    def broken(*_: object) -> list[Command]:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError):
        async with open_agent(registry, registry_path, engine=AbleEngine()) as rig:
            await rig.running(a_request("r"))
            if phase == "swapped out":
                await rig.deliver(LsoSwapOut(instance_id=I1, request_id=R, rest_s=9.0))
                assert rig.engine.running == set()
            monkeypatch.setattr(rig.instance, "handle", broken)
            await eventually(rig.work.done)
            assert await rig.holds(LANE)
            await rig.broker.close()
            assert await rig.far.ready(LANE) == 1


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (NoRoomError("the host is full"), LsoOutcome.REFUSED, "the host is full"),
        (UnsupportedError("no host"), LsoOutcome.REFUSED, "no host"),
        (EngineError("the disk is broken"), LsoOutcome.FAILED, "the disk is broken"),
        (ZeroDivisionError("oops"), LsoOutcome.FAILED, "ZeroDivisionError: oops"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_error_of_a_call_ends_the_operation_and_nothing_else(
    able: AgentRig, error: Exception, outcome: LsoOutcome, message: str
):
    assert isinstance(able.engine, AbleEngine)
    able.engine.fail_warm.append(error)
    failed = await able.ordered(LsoWarm(instance_id=I1, model=OTHER))
    done = await able.ordered(LsoWarm(instance_id=I1, model=OTHER))

    assert (failed.outcome, failed.message) == (outcome, message)
    assert (done.outcome, done.message) == (LsoOutcome.DONE, "warm in 0.25 s")
    assert counted(able, "lsos_total", kind="warm", outcome=outcome.value) == 1


async def test_swapped_out_request_resumes_at_the_end_of_its_rest(able: AgentRig):
    await able.running(a_request("r"))
    able.engine.emit("r", 20)
    await able.deliver(LsoSwapOut(instance_id=I1, request_id=R, rest_s=5.0))
    resumes_at = able.clock.now() + 5.0
    again = await able.engine.began("r")

    assert again.progress == (20,)
    assert able.clock.now() == pytest.approx(resumes_at, rel=0, abs=0.05)


@pytest.mark.parametrize("taken", [False, True])
async def test_work_of_another_model_is_served_by_the_owner_of_its_claim(
    rig: AgentRig, *, taken: bool
):
    """Without a plan, exclusive queues of the broker serve as claims."""
    claim = topology.claim_queue(OTHER)
    if taken:
        await rig.far.declare_queue(claim)
    await rig.put(a_request("r", base=OTHER))
    await asyncio.sleep(30.0)

    assert rig.engine.activations == ([MODEL] if taken else [MODEL, OTHER])
    assert rig.engine.running == (set() if taken else {"r"})
    await rig.far.declare_queue(claim)  # the agent has given its claim back


@pytest.fixture
def own_path(tmp_path: Path) -> Path:
    """A registry file that the test may change."""
    return make_tiny_models(tmp_path, weights=False)


async def test_a_removed_model_is_released_when_no_request_waits_for_it(own_path: Path):
    registry = ModelRegistry.load(own_path)
    entries = [registry.entry(base) for base in registry.bases]
    async with open_agent(registry, own_path) as rig:
        await rig.running(a_request("busy"))  # so that the instance keeps its model
        queue = await rig.put(a_request("waits", base=OTHER))
        write_registry(own_path, [each for each in entries if each.name != OTHER])
        await eventually(lambda: OTHER in rig.instance.removed)
        await asyncio.sleep(2 * GRACE_S)
        assert OTHER in rig.models.entries

        await rig.far.purge(queue)
        await eventually(lambda: OTHER not in rig.models.entries)
        status = await rig.status()
        assert (status.releasing, status.model) == ((), MODEL)
        assert status.registry is not None
        assert status.registry.digest == digest_of(own_path.read_bytes())


def for_adapter(name: str) -> QueuedRequest:
    return a_request(name, model=ModelRef(name=name, base=MODEL, adapter=name))


async def test_a_request_for_an_adapter_waits_until_the_agent_knows_it(own_path: Path):
    """Gateways may have read a newer registry."""
    registry = ModelRegistry.load(own_path)
    entries = {base: registry.entry(base) for base in registry.bases}
    async with open_agent(registry, own_path) as rig:
        await rig.put(for_adapter("sql"))
        await asyncio.sleep(ADAPTER_WAIT_S / 2)
        assert rig.engine.running == set()

        changed = msgspec.structs.replace(entries[MODEL], adapters={"sql": "/adapters/sql"})
        write_registry(own_path, (entries | {MODEL: changed}).values())
        assert (await rig.engine.began("sql")).adapter == "sql"
        write_registry(own_path, entries.values())
        await asyncio.sleep(1.0)
        await rig.put(for_adapter("sql"))  # a request that was queued before the removal
        await rig.engine.began("sql")


async def test_the_engine_decides_about_an_adapter_that_remains_unknown(rig: AgentRig):
    await rig.put(for_adapter("sql"))
    await asyncio.sleep(ADAPTER_WAIT_S + 1.0)

    assert rig.engine.running == {"sql"}


@pytest.mark.parametrize("max_model_len", [None, 64], ids=["same", "other"])
async def test_a_name_is_used_again_when_its_former_model_is_released(
    own_path: Path, max_model_len: int | None
):
    """The same model is kept instead; another one waits."""
    registry = ModelRegistry.load(own_path)
    entries = {base: registry.entry(base) for base in registry.bases}
    again = entries[OTHER]
    if max_model_len is not None:
        again = msgspec.structs.replace(again, max_model_len=max_model_len)
    async with open_agent(registry, own_path, models=()) as rig:
        write_registry(own_path, [each for each in entries.values() if each.name != OTHER])
        await eventually(lambda: OTHER in rig.instance.removed)
        write_registry(own_path, (entries | {OTHER: again}).values())
        await asyncio.sleep(1.0)
        is_kept = max_model_len is None
        assert (OTHER not in rig.instance.removed) == is_kept
        assert (await rig.status()).releasing == (() if is_kept else (OTHER,))

        await asyncio.sleep(2 * GRACE_S)
        assert rig.models.entries[OTHER] == again
        assert OTHER in rig.instance.models
        status = await rig.status()
        assert status.registry is not None
        assert (status.releasing, status.registry.pending) == ((), {})


async def test_events_that_follow_from_each_other_leave_turns_to_others(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    """A decision that repeats itself must not stop the heartbeats of connections."""
    left = 10 * MOST_EVENTS_AT_ONCE

    def again(event: Event, _now: float) -> Sequence[Command]:
        nonlocal left
        if isinstance(event, EngineDied) and left:
            left -= 1
            rig.engine.die()
        return ()

    turns = 0
    with monkeypatch.context() as patched:
        patched.setattr(rig.instance, "handle", again)
        rig.engine.die()
        while left:
            turns += 1
            await asyncio.sleep(0)

    assert turns >= 9
