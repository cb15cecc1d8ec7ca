"""A running keeper of stories, and questions to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.estimator.stories.keeper import StoryKeeper
from services.estimator.stories.shelf import Shelf, ShelfSettings
from shared.broker.protocol import Broker
from shared.broker.stories import ask_stories
from shared.contracts.base import RequestId, TenantId
from shared.contracts.stories.questions import StoriesReported, StoriesRequested
from shared.runtime.clock import SystemClock
from tests.brokers import eventually

ACME = TenantId("acme")


@asynccontextmanager
async def keeping(broker: Broker) -> AsyncIterator[None]:
    """A keeper on *broker*, which answers."""
    clock = SystemClock()
    shelf = Shelf(ShelfSettings(), heard_since=clock.now())
    stop = asyncio.Event()
    running = asyncio.create_task(StoryKeeper(broker=broker, clock=clock, shelf=shelf).run(stop))

    async def answers() -> bool:
        return await asked(broker) is not None

    try:
        await eventually(answers)
        yield
    finally:
        stop.set()
        await running


async def asked(broker: Broker, request_id: str | None = None) -> StoriesReported | None:
    """The answer about `ACME`; None if no keeper answers."""
    return await ask_stories(
        broker,
        lambda reply_to: StoriesRequested(
            reply_to=reply_to,
            tenant=ACME,
            request_id=None if request_id is None else RequestId(request_id),
            limit=1000,
        ),
    )
