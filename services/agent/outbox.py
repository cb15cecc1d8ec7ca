"""Messages of the agent to producers and queues."""

import asyncio
import contextlib

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.broker.retry import (
    Backoff,
    publish_until_confirmed,
    publish_until_routed,
    send_best_effort,
)
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, RequestId, UnixTime, encode
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.requests import (
    ErrorInfo,
    Final,
    QueuedRequest,
    RequestFailed,
    RunStarted,
    TokenChunk,
    TokensEmitted,
)

log = structlog.get_logger()
BACKOFF = Backoff()


class Outbox:
    """
    Publishes the messages of one agent.

    Tokens are batched per reply destination and sent without publisher confirms.

    Args:
        queues: The work queues of this process.
        instance_id: Id of this instance, written into every message.
    """

    def __init__(self, broker: Broker, queues: WorkQueues, instance_id: InstanceId) -> None:
        self._broker = broker
        self._queues = queues
        self._instance_id = instance_id
        self._pending: dict[str, dict[tuple[str, int], TokenChunk]] = {}
        """Reply destination -> run and index of the answer -> the answer's new tokens."""

    async def run_started(self, reply_to: str, message: RunStarted) -> None:
        """Publish that a run has begun, before its tokens."""
        await send_best_effort(
            self._broker,
            topology.REPLIES,
            reply_to,
            OutMessage(
                body=encode(message),
                kind="run.started.v1",
                correlation_id=message.request_id,
                persistent=False,
            ),
        )

    def add_tokens(self, reply_to: str, chunk: TokenChunk) -> None:
        """Add tokens of a run to the next batch for the run's reply destination."""
        pending = self._pending.setdefault(reply_to, {})
        known = pending.get((chunk.run_id, chunk.child))
        pending[chunk.run_id, chunk.child] = (
            chunk
            if known is None
            else TokenChunk(
                request_id=chunk.request_id,
                run_id=chunk.run_id,
                offset=known.offset,
                token_ids=known.token_ids + chunk.token_ids,
                text=known.text + chunk.text,
                details=known.details + chunk.details,
                child=chunk.child,
            )
        )

    async def flush(self, reply_to: str) -> None:
        """Send the batched tokens of one destination."""
        if (message := self._gathered(reply_to)) is not None:
            await send_best_effort(self._broker, topology.REPLIES, reply_to, message)

    async def _flush_confirmed(self, reply_to: str) -> None:
        """Send the batched tokens of one destination and wait for the broker's confirmation."""
        if (message := self._gathered(reply_to)) is not None:
            # If the broker is unavailable, drop these tokens; the final reply also contains them.
            with contextlib.suppress(BrokerUnavailableError):
                await self._broker.publish(topology.REPLIES, reply_to, message)

    def _gathered(self, reply_to: str) -> OutMessage | None:
        """
        Remove and return the batched tokens of one destination as one message; None if there are
        none.
        """
        chunks = self._pending.pop(reply_to, None)
        if not chunks:
            return None
        batch = TokensEmitted(instance_id=self._instance_id, chunks=tuple(chunks.values()))
        return OutMessage(body=encode(batch), kind="tokens.emitted.v1", persistent=False)

    async def flush_all(self) -> None:
        """Send the batched tokens of all destinations."""
        for reply_to in tuple(self._pending):
            await self.flush(reply_to)

    async def final(self, reply_to: str | None, final: Final) -> None:
        """
        Deliver a final reply and wait for the broker's confirmation; retry until the broker
        confirms.

        A final reply for which no reply queue is bound goes to `headway.unclaimed`.
        """
        if reply_to is None:
            return
        # Wait for confirmation of the tokens, which use another channel than final replies and
        # could arrive after them.
        await self._flush_confirmed(reply_to)
        kind = "request.failed.v1" if isinstance(final, RequestFailed) else "request.completed.v1"
        message = OutMessage(
            body=encode(final),
            kind=kind,
            message_id=f"{final.request_id}/{final.run_id or 'failed'}",
            correlation_id=final.request_id,
        )
        outcome = await publish_until_confirmed(self._broker, topology.REPLIES, reply_to, message)
        if outcome is not PublishOutcome.CONFIRMED:
            log.info("final.unclaimed", request_id=final.request_id, outcome=outcome.value)
            await publish_until_routed(self._broker, topology.UNCLAIMED, reply_to, message)

    async def queue(self, queue: str, request: QueuedRequest) -> None:
        """Publish a request to a work queue with a publisher confirm, and notify agents."""
        message = OutMessage(
            body=encode(request),
            kind="request.queued.v1",
            message_id=request.request_id,
            correlation_id=request.request_id,
            reply_to=request.reply_to,
        )
        for delay_s in BACKOFF.delays():
            if await self._queues.publish(queue, message) is PublishOutcome.CONFIRMED:
                break
            await asyncio.sleep(delay_s)
        await self._queues.notify(queue)

    async def dead_letter(self, request: QueuedRequest, error: ErrorInfo) -> None:
        """Copy a request that cannot be served to the dead letters, together with the reason."""
        message = OutMessage(
            body=encode(request),
            kind="request.queued.v1",
            message_id=request.request_id,
            correlation_id=request.request_id,
            reply_to=request.reply_to,
            headers={
                topology.REASON_HEADER: f"{error.code}: {error.message}"[:500],
                "headway-queue": request.lane,
            },
        )
        await publish_until_routed(self._broker, topology.DEAD, request.lane, message)

    async def dead_letter_undecodable(
        self, delivery: Delivery, reason: str, *, now: UnixTime
    ) -> None:
        """
        Report an undecodable message to its producer, copy it to the dead letters and acknowledge
        it.
        """
        if delivery.message_id is not None:
            error = ErrorInfo(message=reason, type="server_error", code="dead_lettered", status=500)
            request_id = RequestId(delivery.message_id)
            await self.final(
                delivery.reply_to, RequestFailed(request_id=request_id, error=error, at=now)
            )
        message = OutMessage(
            body=delivery.body,
            kind=delivery.kind,
            message_id=delivery.message_id,
            reply_to=delivery.reply_to,
            headers={topology.REASON_HEADER: reason[:500], "headway-queue": delivery.queue},
        )
        await publish_until_routed(self._broker, topology.DEAD, delivery.queue, message)
        await delivery.settle(Settlement.ACK)
