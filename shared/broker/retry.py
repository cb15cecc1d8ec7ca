"""Publishing with retries, for times in which the broker is unavailable."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Self
from uuid import uuid4

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.contracts.base import Seconds
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    MessageTooLargeError,
)
from shared.runtime.events import EventLogger
from shared.runtime.stall_detector import PERIOD_S, STALL_S

log = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff up to a maximum; jitter prevents that clients retry at the same time."""

    first_s: float = 0.05
    max_s: float = 2.0

    def delays(self) -> Iterator[Seconds]:
        """
        Yield the wait in seconds before each retry, a random number from the upper half of the
        limit.
        """
        for attempt in count():
            ceiling_s = min(self.max_s, self.first_s * 2.0 ** min(attempt, 32))
            yield ceiling_s * random.uniform(0.5, 1.0)  # noqa: S311  spreads only


_BACKOFF = Backoff()


class Patience:
    """
    Time limit for retries in a context; stalls of this process extend it.

    Without the extension, a stall would let all timeouts expire together, even if answers already
    wait in the socket.

    Args:
        seconds: Time limit; None: no limit.
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
        """True if the time limit ends in more than *seconds*."""
        self._look()
        return self._seen_at + seconds <= self._ends_at

    def _watch(self) -> None:
        self._look()
        self._timer = self._loop.call_later(PERIOD_S, self._watch)

    def _look(self) -> None:
        before, self._seen_at = self._seen_at, self._loop.time()
        # The event loop itself measures the stall: after a stall, each wait of the loop ends late
        # by the length of the stall.
        if (gap_s := self._seen_at - before) > STALL_S:
            self._ends_at += gap_s


async def publish_until_confirmed(
    broker: Broker,
    exchange: str,
    routing_key: str,
    message: OutMessage,
    *,
    give_up_after_s: float | None = None,
    backoff: Backoff = _BACKOFF,
) -> PublishOutcome:
    """
    Publish a message repeatedly, with the same message id, until the broker has answered.

    The message may arrive more than once; receivers drop messages with a known id.

    Args:
        broker: Client that is connected or reconnecting.
        exchange: Name of the exchange.
        routing_key: Routing key of the message.
        message: Message to publish; gets an id if it has none.
        give_up_after_s: Time limit; None: no limit. The last attempt may exceed it, and stalls of
            this process do not count.
        backoff: Waits between attempts.

    Returns:
        The broker's answer.

    Raises:
        BrokerUnavailableError: The time limit passed and the outcome is unknown.
        BrokerConflictError: The exchange does not exist, or the user has no permission; not
            retried.
    """
    if message.message_id is None:
        message = replace(message, message_id=uuid4().hex)
    delays = enumerate(backoff.delays())
    with Patience(give_up_after_s) as patience:
        while True:
            try:
                return await broker.publish(exchange, routing_key, message)
            except BrokerUnavailableError as error:
                attempt, delay_s = next(delays)
                if attempt == 0:
                    log.warning("publish.delayed", exchange=exchange, error=str(error))
                if not patience.lasts(delay_s):
                    raise
            await asyncio.sleep(delay_s)


async def publish_until_routed(
    broker: Broker,
    exchange: str,
    routing_key: str,
    message: OutMessage,
    *,
    backoff: Backoff = _BACKOFF,
) -> None:
    """
    Publish a message until a queue has accepted it.

    If no queue is bound, the topology is declared again where the user's permissions allow it.
    Retries have no limit, since the caller acknowledges the original delivery only after the
    publish.
    """
    for delay_s in backoff.delays():
        try:
            outcome = await publish_until_confirmed(broker, exchange, routing_key, message)
        except BrokerConflictError as error:
            reason = str(error)
        else:
            if outcome is PublishOutcome.CONFIRMED:
                return
            reason = outcome.value
        log.warning("publish.unroutable", exchange=exchange, key=routing_key, reason=reason)
        with suppress(BrokerConflictError):
            await until_available(lambda: topology.declare(broker))
        await asyncio.sleep(delay_s)


async def until_available(
    action: Callable[[], Awaitable[None]], *, backoff: Backoff = _BACKOFF
) -> None:
    """Retry *action*, which must be idempotent, while the broker is unavailable."""
    for delay_s in backoff.delays():
        try:
            await action()
        except BrokerUnavailableError:
            await asyncio.sleep(delay_s)
        else:
            return


async def send_best_effort(
    broker: Broker, exchange: str, routing_key: str, message: OutMessage
) -> None:
    """
    Send soft state.

    A message that cannot be sent now is dropped, since the next one replaces it. A message that the
    broker refuses is dropped also, with a warning.
    """
    try:
        await broker.send(exchange, routing_key, message)
    except BrokerUnavailableError as error:
        log.debug("message.dropped", exchange=exchange, routing_key=routing_key, error=str(error))
    except (BrokerConflictError, MessageTooLargeError) as error:
        log.warning("message.refused", exchange=exchange, routing_key=routing_key, error=str(error))
