"""A producer stops superseded runs and cancelled requests."""

import asyncio

import pytest

from ops.generate.replies import REQUEST, completed, started
from shared.contracts.base import RequestId, RunId
from shared.contracts.control import RequestCancel, RunStop, StopReason
from shared.contracts.requests import ReplyMode, RequestFailed
from tests.unit.producer.producer_rig import BODY, rig

pytestmark = pytest.mark.virtual_time


async def test_cancel_is_broadcast_and_stops_every_later_run():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        await generation.cancel()

        assert await it.controlled() == RequestCancel(
            request_id=REQUEST, reply_to=it.producer.reply_queue
        )
        final = await generation.final()
        assert isinstance(final, RequestFailed)
        assert final.error.code == "cancelled"
        assert [part async for part in generation] == []
        await it.reply(started("b"))
        assert await it.controlled() == RunStop(
            request_id=REQUEST, run_id=RunId("b"), reason=StopReason.CANCELLED
        )


async def test_cancel_of_a_finished_request_has_no_effect():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(completed("a"))
        final = await generation.final()

        await generation.cancel()

        assert await generation.final() == final
        assert await it.far.get("control") is None


async def test_run_that_starts_after_the_final_is_stopped():
    async with rig() as it:
        await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(completed("a"), started("b"))

        assert await it.controlled() == RunStop(
            request_id=REQUEST, run_id=RunId("b"), reason=StopReason.COMPLETED
        )


async def test_exit_cancels_outstanding_requests_and_deletes_the_reply_queue():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        waiting = asyncio.ensure_future(generation.final())
        await it.producer.__aexit__(None, None, None)

        assert isinstance(await waiting, RequestFailed)
        assert await it.controlled() == RequestCancel(
            request_id=RequestId(REQUEST), reply_to=it.producer.reply_queue
        )
        assert await it.far.depth(it.producer.reply_queue) is None
