"""Publishing through outages."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from uuid import uuid4

import structlog

from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.contracts.errors import BrokerUnavailableError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits that double up to a ceiling, each shortened by chance so that clients spread."""

    first_s: float = 0.05
    max_s: float = 2.0

    def delay_s(self, attempt: int, chance: float) -> float:
        """
        Wait before retry *attempt*, from 0.

        Args:
            attempt: How many retries there were.
            chance: Uniform in 0..1.
        """
        ceiling_s = min(self.max_s, self.first_s * 2.0 ** min(attempt, 32))
        return ceiling_s * (0.5 + 0.5 * chance)


_BACKOFF = Backoff()


async def publish_until_confirmed(
    broker: Broker,
    exchange: str,
    routing_key: str,
    message: OutMessage,
    *,
    give_up_after_s: float | None = None,
    retry_refused: bool = False,
    backoff: Backoff = _BACKOFF,
) -> PublishOutcome:
    """
    Publish, again and again under one message id, until the broker has spoken.

    The message may arrive more than once; receivers tell by its id.

    Args:
        broker: Connected, or about to be again.
        exchange: Where to.
        routing_key: What for.
        message: Gets a message id if it has none.
        give_up_after_s: Seconds to try for; None is for ever. The last attempt may outlast it.
        retry_refused: Also try again while a bounded queue is full.
        backoff: Waits between attempts.

    Returns:
        The broker's word; REFUSED with *retry_refused* only when time is up.

    Raises:
        BrokerUnavailableError: Time is up and the outcome unknown.
        BrokerConflictError: No such exchange, or no permission; not tried again.
    """
    if message.message_id is None:
        message = replace(message, message_id=uuid4().hex)
    loop = asyncio.get_running_loop()
    give_up_at = None if give_up_after_s is None else loop.time() + give_up_after_s
    attempt = 0
    while True:
        unavailable: BrokerUnavailableError | None = None
        try:
            outcome = await broker.publish(exchange, routing_key, message)
        except BrokerUnavailableError as error:
            unavailable = error
            if attempt == 0:
                log.warning("publish.delayed", exchange=exchange, error=str(error))
        else:
            if outcome is not PublishOutcome.REFUSED or not retry_refused:
                return outcome
        delay_s = backoff.delay_s(attempt, random.random())  # noqa: S311  spreads, hides nothing
        if give_up_at is not None and loop.time() + delay_s > give_up_at:
            if unavailable is not None:
                raise unavailable
            return PublishOutcome.REFUSED
        await asyncio.sleep(delay_s)
        attempt += 1


async def until_available(
    action: Callable[[], Awaitable[None]], *, backoff: Backoff = _BACKOFF
) -> None:
    """Do *action*, again and again while the broker is away. It must be safe to repeat."""
    attempt = 0
    while True:
        try:
            await action()
        except BrokerUnavailableError:
            await asyncio.sleep(backoff.delay_s(attempt, random.random()))  # noqa: S311  as above
            attempt += 1
        else:
            return


async def send_softly(broker: Broker, exchange: str, routing_key: str, message: OutMessage) -> None:
    """Send soft state: what cannot be sent now is dropped, the next one makes up for it."""
    try:
        await broker.send(exchange, routing_key, message)
    except BrokerUnavailableError as error:
        log.debug("message.dropped", exchange=exchange, routing_key=routing_key, error=str(error))
