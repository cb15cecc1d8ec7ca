"""Batching of tokens for producers."""

import asyncio

import pytest

from shared.broker import topology
from shared.contracts.base import RequestId, RunId
from shared.contracts.requests import TokenChunk, TokensEmitted
from tests.brokers import eventually
from tests.queued import a_request
from tests.unit.agent.rig import REPLY, AgentRig

pytestmark = pytest.mark.virtual_time


def chunk(run: str, offset: int, *tokens: int) -> TokenChunk:
    return TokenChunk(
        request_id=RequestId(f"of-{run}"),
        run_id=RunId(run),
        offset=offset,
        token_ids=tokens,
        text="".join(f"{token}." for token in tokens),
    )


async def batches(rig: AgentRig) -> list[list[TokenChunk]]:
    return [list(reply.chunks) for reply in await rig.replies() if isinstance(reply, TokensEmitted)]


async def test_chunks_of_one_run_are_merged(rig: AgentRig):
    rig.outbox.add_tokens(REPLY, chunk("a", 3, 20))
    rig.outbox.add_tokens(REPLY, chunk("a", 4, 21, 22))
    await rig.outbox.flush_all()
    assert await batches(rig) == [[chunk("a", 3, 20, 21, 22)]]


async def test_runs_with_one_destination_share_a_message(rig: AgentRig):
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.outbox.add_tokens(REPLY, chunk("b", 5, 30))
    await rig.outbox.flush_all()
    assert await batches(rig) == [[chunk("a", 0, 20), chunk("b", 5, 30)]]


async def test_destinations_do_not_share_messages(rig: AgentRig):
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.outbox.add_tokens("elsewhere", chunk("b", 0, 30))
    await rig.outbox.flush(REPLY)
    assert rig.broker.sent == [REPLY]
    await rig.outbox.flush_all()
    assert rig.broker.sent == [REPLY, "elsewhere"]


async def test_tokens_are_sent_once_and_empty_messages_never(rig: AgentRig):
    await rig.outbox.flush_all()
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    await rig.outbox.flush_all()
    await rig.outbox.flush_all()
    assert rig.broker.sent == [REPLY]


async def test_tokens_that_cannot_be_sent_are_dropped_and_are_in_the_final(
    rig: AgentRig,
):
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.broker.lose_connection()
    await rig.outbox.flush_all()
    rig.broker.reconnect()
    await rig.outbox.flush_all()
    assert await batches(rig) == []


async def test_missing_queue_is_declared(rig: AgentRig):
    request = a_request()
    await rig.outbox.queue(request.lane, request)
    await rig.far.delete_queue(request.lane)
    await rig.outbox.queue(request.lane, request)
    assert await rig.requeued(request.lane) == request


async def test_publish_to_a_queue_retries_through_outages(rig: AgentRig):
    request = a_request()
    rig.broker.lose_connection()
    task = asyncio.create_task(rig.outbox.queue(request.lane, request))
    await asyncio.sleep(0)
    rig.broker.reconnect()
    rig.broker.down.add(topology.LANES)
    await eventually(lambda: topology.LANES in rig.broker.attempts)
    rig.broker.down.clear()
    await task
    assert await rig.requeued(request.lane) == request
