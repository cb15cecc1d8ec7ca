"""Reads the cancellations that the broker keeps, so that no cancelled request begins."""

import asyncio
import secrets
from contextlib import suppress

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker, DeliveryHandler, OutMessage, PublishOutcome, Subscription
from shared.broker.retry import publish_until_confirmed
from shared.contracts.base import Seconds
from shared.contracts.control import CancelsMarked
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    QueueNotFoundError,
    TransientError,
)

log = structlog.get_logger()
PREFETCH = 256
RETRY_S: Seconds = 0.1
"""Pause between two looks whether the connection and the stream are there."""
MARK_AGAIN_S: Seconds = 10.0
"""Time after which a mark that was not read is sent again: the stream may have been deleted."""
ABSENT_RETRY_S: Seconds = 60.0
"""Pause between two attempts to read a stream that does not exist; the broker logs each."""


class Cancels:
    """
    Reads the stream of cancellations, and reports whether all that were sent so far are known.

    After a lost connection, the client reads the stream again from its oldest message on.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.known = False
        """False while a cancellation may have been sent that was not read yet."""
        self._subscription: Subscription | None = None
        self._missed = asyncio.Event()
        """Set when the connection is lost."""
        self._mark = ""
        self._marked = asyncio.Event()
        """Set when the mark was read."""
        broker.on_connection_lost(self._on_connection_lost)

    async def start(self, handler: DeliveryHandler) -> None:
        """
        Give all kept cancellations to *handler*, and return when they are known.

        Returns at once if the broker keeps none, because no planner of this version has declared
        the stream, or because the user of this process may not read it.
        """
        await self._catch_up(handler)

    async def follow(self, handler: DeliveryHandler) -> None:
        """Read what was missed after each lost connection, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._subscription else ABSENT_RETRY_S):
                    await self._missed.wait()
            await self._catch_up(handler)

    async def close(self) -> None:
        """Stop reading."""
        if self._subscription is not None:
            await self._subscription.cancel()

    def on_mark(self, mark: str) -> None:
        """Handle a mark of the stream, of this agent or another."""
        if mark == self._mark:
            self._marked.set()

    def _on_connection_lost(self) -> None:
        self.known = False
        self._missed.set()

    async def _catch_up(self, handler: DeliveryHandler) -> None:
        self._missed.clear()
        if await self._reads(handler):
            await self._read_all()
        self.known = not self._missed.is_set()

    async def _reads(self, handler: DeliveryHandler) -> bool:
        """
        Wait until the stream is being read; return False if there is none.

        A mark that is sent before would not follow what is sent until then.
        """
        while True:
            try:
                if self._subscription is None:
                    self._subscription = await self._broker.read(
                        topology.CANCELS, handler, prefetch=PREFETCH
                    )
                if self._broker.connected:
                    return True
            except (QueueNotFoundError, BrokerAccessError) as error:
                log.warning("cancels.not_kept", error=str(error))
                return False
            except (TransientError, BrokerConflictError) as error:
                log.warning("cancels.delayed", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _read_all(self) -> None:
        """Wait until everything has been read that was sent to the stream before this call."""
        self._mark = secrets.token_hex(8)
        self._marked.clear()
        message = OutMessage.transient(CancelsMarked(mark=self._mark))
        while not self._marked.is_set():
            outcome = await publish_until_confirmed(
                self._broker, topology.CONTROL, topology.CANCELS_MARK, message
            )
            if outcome is not PublishOutcome.CONFIRMED:
                log.warning("cancels.not_kept", error=f"the mark is {outcome.value}")
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(MARK_AGAIN_S):
                    await self._marked.wait()
