"""Tokens of runs for their producers, batched per reply destination and sent without confirms."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TypeAlias

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import RequestId, Seconds
from shared.contracts.errors import BrokerUnavailableError, MessageTooLargeError
from shared.contracts.requests import RunStarted, TokenChunk, TokensEmitted

_Chunks: TypeAlias = dict[tuple[str, int], TokenChunk]
"""Run and index of the answer -> the answer's new tokens."""


class Outbox:
    """
    Sends the starts and tokens of runs; the methods that add messages return at once.

    Args:
        broker: Carries all messages of the runs but their outcomes.
        period_s: Time for which tokens are batched.
    """

    def __init__(self, broker: Broker, period_s: Seconds) -> None:
        self._broker = broker
        self._period_s = period_s
        self._pending: dict[str, list[RunStarted | _Chunks]] = {}
        """Reply destination -> messages in order."""
        self._hurried: set[str] = set()
        """Destinations whose messages are sent before the end of the period."""
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()
        """Held while messages are sent, so that the messages of a destination stay in order."""

    def run_started(self, reply_to: str, started: RunStarted) -> None:
        """Send that a run has begun, before its tokens."""
        self._pending.setdefault(reply_to, []).append(started)
        self.hurry(reply_to)

    def add_tokens(self, reply_to: str, chunk: TokenChunk) -> None:
        """Add tokens of a run to the next batch for the run's reply destination."""
        if not self._pending:
            self._wake.set()  # the period of these tokens begins
        pending = self._pending.setdefault(reply_to, [])
        if not pending or isinstance(pending[-1], RunStarted):
            pending.append({})
        chunks = pending[-1]
        assert not isinstance(chunks, RunStarted)  # noqa: S101 - appended above
        known = chunks.get((chunk.run_id, chunk.child))
        chunks[chunk.run_id, chunk.child] = chunk if known is None else _joined(known, chunk)

    def hurry(self, reply_to: str) -> None:
        """Send the messages of a destination now."""
        self._hurried.add(reply_to)
        self._wake.set()

    async def work(self, stop: asyncio.Event) -> None:
        """Send batches until *stop* is set."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not stop.is_set():
            if self._pending:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._wake.wait()
            else:
                await self._wake.wait()
                due = loop.time() + self._period_s
            self._wake.clear()
            hurried, self._hurried = self._hurried, set()
            if loop.time() >= due:
                hurried, due = set(self._pending), loop.time() + self._period_s
            async with self._sending:
                for reply_to in hurried:
                    for each in self._pending.pop(reply_to, ()):
                        message = _message(each)
                        await send_best_effort(self._broker, topology.REPLIES, reply_to, message)

    def stop(self) -> None:
        """Let `work` see that its event is set."""
        self._wake.set()

    async def flush_confirmed(
        self, reply_to: str, request_id: RequestId, *, in_order: bool = False
    ) -> None:
        """
        Publish the messages of one request and wait for the broker's confirms.

        The messages of other requests stay in order with those that `work` sends: confirmed
        messages have another channel, and the broker does not order two channels.

        If the broker is unavailable or refuses their size, they are dropped; the final reply also
        has the tokens.

        Args:
            reply_to: Reply destination of the request.
            request_id: The request.
            in_order: True: what `work` has sent before precedes these messages and those that are
                published next.
        """
        async with self._sending:
            messages = self.taken(reply_to, request_id)
        with contextlib.suppress(BrokerUnavailableError):
            if in_order:
                await self._broker.flush_sent()
            await self.publish(reply_to, messages)

    async def publish(self, reply_to: str, messages: Iterable[OutMessage]) -> None:
        """Publish messages of one request that were taken, as `flush_confirmed` does."""
        with contextlib.suppress(BrokerUnavailableError, MessageTooLargeError):
            for message in messages:
                await self._broker.publish(topology.REPLIES, reply_to, message)

    def taken(self, reply_to: str, request_id: RequestId) -> list[OutMessage]:
        """Remove and return the messages of one request, in order."""
        return [_message(each) for each in self._taken(reply_to, request_id)]

    def _taken(self, reply_to: str, request_id: RequestId) -> list[RunStarted | _Chunks]:
        taken: list[RunStarted | _Chunks] = []
        left: list[RunStarted | _Chunks] = []
        for each in self._pending.pop(reply_to, ()):
            if isinstance(each, RunStarted):
                (taken if each.request_id == request_id else left).append(each)
                continue
            own = {key: chunk for key, chunk in each.items() if chunk.request_id == request_id}
            others = {key: chunk for key, chunk in each.items() if key not in own}
            taken += [own] if own else []
            left += [others] if others else []
        if left:
            self._pending[reply_to] = left
        return taken


def _message(pending: RunStarted | _Chunks) -> OutMessage:
    if isinstance(pending, RunStarted):
        return OutMessage.transient(pending, correlation_id=pending.request_id)
    return OutMessage.transient(TokensEmitted(chunks=tuple(pending.values())))


def _joined(known: TokenChunk, chunk: TokenChunk) -> TokenChunk:
    return TokenChunk(
        request_id=chunk.request_id,
        run_id=chunk.run_id,
        offset=known.offset,
        token_ids=known.token_ids + chunk.token_ids,
        text=known.text + chunk.text,
        details=known.details + chunk.details,
        child=chunk.child,
    )
