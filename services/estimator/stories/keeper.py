"""Keeps the records of requests that end, and answers questions about them."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from services.estimator.stories.shelf import Shelf
from shared.broker import topology
from shared.broker.consumer import Dispatcher, Handler
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import InstanceId, Message
from shared.contracts.errors import MeshError
from shared.contracts.stories.questions import StoriesRequested
from shared.contracts.stories.story import StoriesObserved
from shared.runtime.clock import Clock

PREFETCH = 64


@dataclass(slots=True, kw_only=True)
class StoryKeeper:
    """
    Keeps the records that agents and groupers send. Each estimator hears of all ends; after a
    restart it knows those that it has heard of since.

    Args:
        shelf: Has the records.
    """

    broker: Broker
    clock: Clock
    shelf: Shelf

    async def run(self, stop: asyncio.Event) -> None:
        """Keep records and answer questions until *stop*."""
        queue = topology.temporary_queue("estimator-stories")
        await self.broker.declare_queue(queue)
        for exchange, key in (
            (topology.TELEMETRY, topology.STORIES_KEY),
            (topology.CONTROL, topology.CONTROL_STORIES),
        ):
            binding = BindingSpec(exchange=exchange, queue=queue.name, routing_key=key)
            await self.broker.bind(binding)
        handle = Dispatcher(HANDLERS, self).handle
        subscription = await self.broker.consume(
            queue.name, handle, prefetch=PREFETCH, gathers_acks=True
        )
        try:
            await stop.wait()
        finally:
            await subscription.cancel()
            with suppress(MeshError):
                await self.broker.delete_queue(queue.name)

    async def answer(self, asked: StoriesRequested) -> None:
        """Publish the answer to a question."""
        answer = self.shelf.answer(asked, self.clock.now())
        message = OutMessage.transient(answer)
        await send_best_effort(self.broker, topology.REPLIES, asked.reply_to, message)


async def on_observed(message: StoriesObserved, keeper: StoryKeeper, _delivery: Delivery) -> None:
    """Keep what an agent or grouper reports."""
    for request in message.pulled:
        keeper.shelf.pulled(request, InstanceId(message.sender))
    for requeued in message.requeued:
        keeper.shelf.requeued(requeued)
    now = keeper.clock.now()
    for story in message.ended:
        keeper.shelf.ended(story, now)


async def on_requested(message: StoriesRequested, keeper: StoryKeeper, _delivery: Delivery) -> None:
    """Answer a question."""
    await keeper.answer(message)


HANDLERS: dict[type[Message], Handler[StoryKeeper]] = {
    StoriesObserved: on_observed,
    StoriesRequested: on_requested,
}
