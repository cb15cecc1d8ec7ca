"""Errors and cancellations of calls of the AMQP library."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from aiormq.exceptions import ChannelNotFoundEntity

from shared.broker.amqp.errors import amqp_errors
from shared.contracts.errors import BrokerUnavailableError, QueueNotFoundError


def succeed() -> None:
    """Do nothing."""


def fail() -> None:
    raise ChannelNotFoundEntity("no queue")


async def call(end: Callable[[], None]) -> None:
    """A call of a library that loses a cancellation in the moment in which the call ends."""
    with amqp_errors("call"):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        end()


@pytest.mark.parametrize("end", [succeed, fail])
async def test_a_cancellation_that_the_library_loses_is_raised(end: Callable[[], None]):
    calling = asyncio.create_task(call(end))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})

    assert calling.cancelled()


async def test_a_time_limit_that_the_library_loses_is_kept():
    with pytest.raises(BrokerUnavailableError, match="call: TimeoutError"), amqp_errors("call"):
        async with asyncio.timeout(0.01):
            await call(succeed)


async def test_a_task_that_continues_after_a_cancellation_can_call_again():
    async def cleaning_up() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with amqp_errors("close"):
            await asyncio.sleep(0)
        with pytest.raises(QueueNotFoundError, match="close: no queue"), amqp_errors("close"):
            fail()
        return "closed"

    task = asyncio.create_task(cleaning_up())
    await asyncio.sleep(0)
    task.cancel()

    assert await task == "closed"
