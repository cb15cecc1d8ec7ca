"""A question on the control exchange, and the answer to it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.contracts.base import Decoder, Message, Seconds, encode, tag_of
from shared.contracts.errors import ContractError

A = TypeVar("A", bound=Message)


async def ask(
    broker: Broker,
    routing_key: str,
    question: Callable[[str], Message],
    answers: Decoder[A],
    *,
    timeout_s: Seconds,
) -> A | PublishOutcome | None:
    """
    Publish a question and wait for its first answer.

    Args:
        broker: Whose control and reply exchanges.
        routing_key: On the control exchange.
        question: Made for the queue that the answer is to go to.
        answers: What counts as one; anything else is passed over.
        timeout_s: For the answer.

    Returns:
        The answer; the broker's word when nobody gets the question; None when time is up.
    """
    answered: asyncio.Future[A] = asyncio.get_running_loop().create_future()

    async def on_answer(delivery: Delivery) -> None:
        with suppress(ContractError):  # a newer kind than this process knows
            answer = answers(delivery.body)
            if not answered.done():
                answered.set_result(answer)
        await delivery.settle(Settlement.ACK)

    queue, binding = topology.answer_queue()
    await broker.declare_queue(queue)
    await broker.bind(binding)
    subscription = await broker.consume(queue.name, on_answer, prefetch=1)
    try:
        asked = question(queue.name)
        message = OutMessage(body=encode(asked), kind=tag_of(type(asked)), persistent=False)
        outcome = await broker.publish(topology.CONTROL, routing_key, message)
        if outcome is not PublishOutcome.CONFIRMED:
            return outcome
        with suppress(TimeoutError):
            return await asyncio.wait_for(answered, timeout_s)
        return None
    finally:
        await subscription.cancel()
