"""An agent publishes requests that it holds for long again, with their progress, and keeps them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.agent.departures import RENEWAL_HEADER
from shared.broker import topology
from shared.broker.queue_list import rewriting
from shared.contracts.lanes import inbox_name
from shared.contracts.requests import FinishReason, RequestCompleted, RunStarted
from shared.models.registry import ModelRegistry
from tests.agents.rig import I1, LANE, REPLY, AgentRig, decode_queued, open_agent
from tests.queued import a_request

pytestmark = pytest.mark.virtual_time

TIMEOUT_S = 100.0
INBOX = inbox_name(I1)


@pytest.fixture
async def rig(registry: ModelRegistry, registry_path: Path) -> AsyncIterator[AgentRig]:
    async with open_agent(registry, registry_path, consumer_timeout_s=TIMEOUT_S) as opened:
        yield opened


async def begun(rig: AgentRig) -> None:
    """Run a request that has two tokens."""
    await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", 7, 8)


async def test_held_request_leaves_its_lane_and_is_answered_once(rig: AgentRig):
    await begun(rig)
    await asyncio.sleep(3 * TIMEOUT_S)
    assert await rig.is_empty(LANE)
    assert await rig.holds(INBOX)
    rig.engine.emit("r", 9, finish=FinishReason.LENGTH)
    replies, final = await rig.final()

    assert isinstance(final, RequestCompleted)
    assert final.token_ids == (7, 8, 9)
    assert (final.attempts.hop, final.history) == (0, ())
    assert sum(isinstance(each, RunStarted) for each in replies) == 1
    assert await rig.is_empty(INBOX)


async def test_copy_has_the_progress_of_the_run(rig: AgentRig):
    await begun(rig)
    await asyncio.sleep(TIMEOUT_S)
    rig.broker.drop_connection()  # as if the agent died: the broker has the copy only
    copy = await rig.far.get(INBOX)

    assert copy is not None
    assert decode_queued(copy.body).progress.token_ids == (7, 8)
    assert RENEWAL_HEADER in copy.headers
    assert await rig.is_empty(LANE)


async def test_copy_of_an_earlier_process_is_served_like_any_request(rig: AgentRig):
    request = a_request("r")
    await rig.running(request)
    await asyncio.sleep(TIMEOUT_S)
    headers = {RENEWAL_HEADER: f"another/{rig.instance.requests.runs[0].number}"}
    await rig.put(a_request("s"), INBOX, headers=headers)
    await rig.engine.began("s")
    for name in ("r", "s"):
        rig.engine.emit(name, finish=FinishReason.LENGTH)
    assert await rig.is_empty(INBOX)


async def test_inbox_is_listed_for_a_new_leader(rig: AgentRig):
    await begun(rig)
    await asyncio.sleep(TIMEOUT_S)
    async with rewriting(rig.far) as listed:
        assert INBOX in listed.queues


async def test_deleted_inbox_is_created_again_and_the_request_kept(rig: AgentRig):
    await begun(rig)
    await asyncio.sleep(TIMEOUT_S)
    await topology.close_work_queue(rig.far, INBOX)
    await rig.far.delete_queue(INBOX)
    await asyncio.sleep(TIMEOUT_S)
    assert await rig.holds(INBOX)
    rig.engine.emit("r", finish=FinishReason.LENGTH)
    await rig.completed()


async def test_request_that_cannot_be_renewed_keeps_its_delivery(rig: AgentRig):
    await begun(rig)
    rig.broker.down.add(topology.LANES)
    await asyncio.sleep(TIMEOUT_S)
    assert await rig.holds(LANE)
    rig.broker.down.clear()
    await asyncio.sleep(TIMEOUT_S)
    assert await rig.is_empty(LANE)
    assert await rig.holds(INBOX)


async def test_copy_without_its_request_is_acknowledged(rig: AgentRig):
    """For example the second copy of a publish that was repeated after a lost confirm."""
    await begun(rig)
    await asyncio.sleep(TIMEOUT_S)
    number = rig.instance.requests.runs[0].number
    headers = {RENEWAL_HEADER: f"{rig.instance.settings.incarnation}/{number}"}
    rig.engine.emit("r", finish=FinishReason.LENGTH)
    await rig.completed()
    await rig.put(a_request("r"), INBOX, headers=headers)
    await asyncio.sleep(1.0)

    assert await rig.is_empty(INBOX)
    assert rig.instance.totals.pulled == 1


async def test_copy_that_is_too_large_with_its_progress_goes_without(rig: AgentRig):
    await begun(rig)
    rig.engine.emit("r", *range(20, 420))
    rig.broker.max_message_size = 1200
    await asyncio.sleep(TIMEOUT_S)
    assert await rig.is_empty(LANE)
    rig.broker.drop_connection()
    copy = await rig.far.get(INBOX)

    assert copy is not None
    assert decode_queued(copy.body).progress.token_ids == ()
