"""Keeps the usage of tenants: counts finals, acknowledges them when they are on disk, answers."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.estimator.usage.book import DAY_S, UsageBook
from services.estimator.usage.files import UsageFiles
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage, Settlement
from shared.broker.retry import send_best_effort
from shared.contracts.base import Decoder, Message, Seconds
from shared.contracts.errors import ContractError, MeshError
from shared.contracts.tenants.usage import (
    HOUR_S,
    RequestMetered,
    UsageReported,
    UsageRequested,
    UsageToday,
)
from shared.runtime.clock import Clock
from shared.runtime.tasks import every, pause

log = structlog.get_logger()
WRITE_PERIOD_S: Seconds = 0.05
TODAY_PERIOD_S: Seconds = 1.0
COMPACT_PERIOD_S: Seconds = 3600.0
LOCK_PERIOD_S: Seconds = 1.0
MOST_AT_ONCE = 512
"""Finals that may wait to be written; further ones wait in the queue."""
_decode: Decoder[RequestMetered] = Decoder(RequestMetered)
_decode_question: Decoder[UsageRequested] = Decoder(UsageRequested)


@dataclass(slots=True, kw_only=True)
class UsageKeeper:
    """
    Counts the finals in `headway.usage`, of which only one process gets deliveries at a time.

    Args:
        directory: Directory of the files; None: usage is counted in memory until the process ends.
        keep_s: Age from which hours are dropped; None: none are.
    """

    broker: Broker
    clock: Clock
    directory: Path | None
    keep_s: Seconds | None = None
    book: UsageBook = field(default_factory=UsageBook)
    _files: UsageFiles | None = None
    _waiting: list[tuple[Delivery, RequestMetered]] = field(default_factory=list)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, stop: asyncio.Event) -> None:
        """
        Keep the usage until *stop*.

        Raises:
            SettingsError: The directory cannot be written, or its files are not valid.
        """
        if not await self._open(stop):
            return
        try:
            await self._serve(stop)
        finally:
            if self._files is not None:
                self._files.close()

    async def _open(self, stop: asyncio.Event) -> bool:
        """Wait until no other process writes the files, and load them; False after *stop*."""
        if self.directory is None:
            return not stop.is_set()
        files = UsageFiles(self.directory)
        while not files.try_lock():
            if await pause(stop, LOCK_PERIOD_S):
                return False
        await asyncio.to_thread(files.load, self.book)
        self._files = files
        log.info("usage.loaded", rows=len(self.book.rows))
        return True

    async def _serve(self, stop: asyncio.Event) -> None:
        questions = topology.temporary_queue("estimator-usage")
        await self.broker.declare_queue(questions)
        key = topology.CONTROL_USAGE
        await self.broker.bind(
            BindingSpec(exchange=topology.CONTROL, queue=questions.name, routing_key=key)
        )
        answering = await self.broker.consume(questions.name, self.on_question, prefetch=16)
        # A final that comes twice is counted once.
        counting = await self.broker.consume(
            topology.USAGE, self.on_final, prefetch=MOST_AT_ONCE, gathers_acks=True
        )
        loops: tuple[tuple[str, Seconds, Callable[[], Awaitable[None]]], ...] = (
            ("usage.write", WRITE_PERIOD_S, self.write),
            ("usage.today", TODAY_PERIOD_S, self.publish_today),
            ("usage.compact", COMPACT_PERIOD_S, self.compact),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, period_s, action in loops:
                    tasks.create_task(every(period_s, action, stop=stop), name=name)
        finally:
            await self.write()
            await counting.cancel()
            await answering.cancel()
            with suppress(MeshError):
                await self.broker.delete_queue(questions.name)

    async def on_final(self, delivery: Delivery) -> None:
        """Take a final; it is acknowledged when it is on disk."""
        try:
            metered = _decode(delivery.body)
        except ContractError as error:
            log.warning("usage.rejected", error=str(error))
            await delivery.settle(Settlement.REJECT)
            return
        self._waiting.append((delivery, metered))

    async def write(self) -> None:
        """Write the finals that have come, count them, and acknowledge them."""
        async with self._writing:
            batch, self._waiting = self._waiting, []
            new: dict[str, RequestMetered] = {}
            for _, metered in batch:
                if not self.book.has(metered):
                    new.setdefault(f"{metered.tenant}\0{metered.request_id}", metered)
            if new and self._files is not None:
                try:
                    await asyncio.to_thread(
                        self._files.append, tuple(new.values()), self.clock.now()
                    )
                except OSError as error:
                    log.error("usage.not_written", finals=len(new), error=str(error))
                    self._waiting = batch + self._waiting  # the queue also keeps them
                    return
            for metered in new.values():
                self.book.add(metered)
        for delivery, _ in batch:
            await delivery.settle(Settlement.ACK)

    async def compact(self) -> None:
        """Add old journals to the totals, and drop the usage of hours that are not kept."""
        now = self.clock.now()
        oldest_hour = 0 if self.keep_s is None else int((now - self.keep_s) // HOUR_S + 1) * HOUR_S
        async with self._writing:
            self.book.forget_before(oldest_hour)
            if self._files is None:
                return
            try:
                await asyncio.to_thread(self._files.compact, now, oldest_hour)
            except OSError as error:
                log.error("usage.not_compacted", error=str(error))

    async def publish_today(self) -> None:
        """Publish the tokens that tenants have used today, for their budgets."""
        day = int(self.clock.now() // DAY_S)
        message = UsageToday(day=day, tokens=self.book.used_on(day))
        await self._send(topology.TELEMETRY, topology.USAGE_TODAY_KEY, message)

    async def on_question(self, delivery: Delivery) -> None:
        """Answer a question about usage, with all that has come so far."""
        try:
            asked = _decode_question(delivery.body)
        except ContractError as error:
            log.warning("question.unreadable", error=str(error))
        else:
            await self.write()
            answer = UsageReported(
                rows=self.book.answer(asked), counts_since=self.book.counts_since
            )
            await self._send(topology.REPLIES, asked.reply_to, answer)
        await delivery.settle(Settlement.ACK)

    async def _send(self, exchange: str, key: str, message: Message) -> None:
        out = OutMessage.transient(message)
        await send_best_effort(self.broker, exchange, key, out)
