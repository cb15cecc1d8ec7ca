"""Questions and answers over the control exchange."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.contracts.base import Decoder, Message, Seconds

A = TypeVar("A", bound=Message)


async def ask(
    broker: Broker,
    routing_key: str,
    question: Callable[[str], Message],
    answers: Decoder[A],
    *,
    timeout_s: Seconds,
    user_id: str | None = None,
) -> A | PublishOutcome | None:
    """
    Publish a question and wait for its first answer.

    Args:
        broker: Connected client.
        routing_key: Routing key of the question on the control exchange.
        question: Creates the question from the name of the answer queue.
        answers: Decoder of answers; messages that it rejects are skipped.
        timeout_s: Time limit for the answer.
        user_id: Broker user of this connection, if the answer depends on it.

    Returns:
        The answer, the publish outcome if no queue accepts the question, or None after the timeout.
    """
    answered: asyncio.Future[A] = asyncio.get_running_loop().create_future()

    def on_answer(answer: A) -> None:
        if not answered.done():
            answered.set_result(answer)

    queue = topology.temporary_queue("reply.answer")
    async with listening(broker, queue, answers, [(topology.REPLIES, queue.name)], on_answer):
        asked = question(queue.name)
        message = OutMessage.transient(asked, user_id=user_id)
        outcome = await broker.publish(topology.CONTROL, routing_key, message)
        if outcome is not PublishOutcome.CONFIRMED:
            return outcome
        with suppress(TimeoutError):
            return await asyncio.wait_for(answered, timeout_s)
        return None
