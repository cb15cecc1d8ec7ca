"""Publishing through outages."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self
from uuid import uuid4

import structlog

from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.contracts.base import Seconds
from shared.contracts.errors import BrokerUnavailableError
from shared.runtime.attention import PERIOD_S, STALL_S

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


class Patience:
    """
    Seconds to try for, while the context is open; those that this process stood still come on top.

    After a stall all timeouts have run out at once, those of answers that wait in the socket, too.

    Args:
        seconds: None is for ever.
    """

    def __init__(self, seconds: Seconds | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._seen_at = self._loop.time()
        self._ends_at = math.inf if seconds is None else self._seen_at + seconds
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._ends_at < math.inf:
            self._watch()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def lasts(self, seconds: Seconds) -> bool:
        """Whether it is not over in so many seconds from now."""
        self._look()
        return self._seen_at + seconds <= self._ends_at

    def _watch(self) -> None:
        self._look()
        self._timer = self._loop.call_later(PERIOD_S, self._watch)

    def _look(self) -> None:
        before, self._seen_at = self._seen_at, self._loop.time()
        # Only the loop itself can tell: each of its waits is over late by what it stood still.
        if (gap_s := self._seen_at - before) > STALL_S:
            self._ends_at += gap_s


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
        give_up_after_s: Seconds to try for; None is for ever. The last attempt may outlast it, and
            what this process stood still for does not count.
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
    attempt = 0
    with Patience(give_up_after_s) as patience:
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
            delay_s = backoff.delay_s(attempt, random.random())  # noqa: S311  spreads only
            if not patience.lasts(delay_s):
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
