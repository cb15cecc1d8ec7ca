"""Outcomes of requests: each is published and confirmed before its deliveries are acknowledged."""

import asyncio
from dataclasses import replace

import msgspec
import structlog

from services.agent.call_answer import CallAnswer
from services.agent.metrics import COMPLETED
from services.agent.outbox import Outbox
from services.agent.runs import Run, Runs
from shared.broker import topology
from shared.broker.dead_letters import copy_of, dead_letter
from shared.broker.finals import publish_final, stored_for
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.broker.queue_list import list_queue
from shared.broker.retry import Backoff, publish_until_confirmed
from shared.broker.work_queues import WorkQueues, queued_message, stored_message
from shared.contracts.base import RequestId, UnixTime, encode, tag_of
from shared.contracts.errors import BrokerConflictError, MessageTooLargeError
from shared.contracts.lanes import inbox_name
from shared.contracts.requests import (
    Attempts,
    ErrorInfo,
    Final,
    FinishReason,
    QueuedRequest,
    RequestCompleted,
    RequestFailed,
    Timings,
    Usage,
)
from shared.contracts.tenants.usage import RequestMetered
from shared.runtime.clock import Clock
from solver.instance.commands import (
    Completion,
    DeadLetter,
    Depart,
    Failure,
    Renew,
    Requeueing,
)
from solver.instance.state import InstanceSettings

log = structlog.get_logger()
_BACKOFF = Backoff()
RENEWAL_HEADER = "headway-renewal"
"""Header of a copy of a held request: the process that holds the request, and its number there."""
RENEW_WITHIN_S = 10.0
"""Time after which a renewal is given up; it is repeated later."""


class Departures:
    """
    Publishes the outcomes of requests; each method waits for the broker's confirms.

    Args:
        queues: The work queues of this process.
        outbox: Sends the tokens that precede a final reply.
        runs: The last runs of held requests.
        settings: Constants of the instance.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        queues: WorkQueues,
        outbox: Outbox,
        runs: Runs,
        settings: InstanceSettings,
        clock: Clock,
    ) -> None:
        self._broker = broker
        self._queues = queues
        self._outbox = outbox
        self._runs = runs
        self._settings = settings
        self._is_inbox_listed = False
        self._clock = clock

    async def publish(self, command: Depart) -> UnixTime:
        """Publish all messages of an outcome, in order; return the time of the outcome."""
        request, now = command.request, self._clock.now()
        run = self._runs.last(command.number)
        unsent: list[OutMessage] = []
        if request.reply_to is not None:
            if _has_all_events(command, run):
                unsent = self._outbox.taken(request.reply_to, request.request_id)
            else:
                await self._outbox.flush_confirmed(
                    request.reply_to, request.request_id, in_order=_needs_order(command, run)
                )
        for publication in command.publications:
            match publication:
                case Completion() if run is not None:
                    await self._answer(command, run, now, unsent)
                case Failure(error=error):
                    await self._fail(command, error, now)
                case DeadLetter(error=error):
                    await self._dead_letter(request, error)
                case Requeueing(queue=queue, attempts=attempts):
                    await self._requeue(command, queue, attempts)
        return now

    async def _answer(
        self, command: Depart, run: Run, now: UnixTime, unsent: list[OutMessage]
    ) -> None:
        """
        Publish the final reply; if the broker refuses its size, the tokens *unsent* and a reply
        that says so.
        """
        try:
            completed = self._completed(command, run, now)
            await self._final(command.request, completed)
            await self._meter(command, now, usage=completed.usage)
        except MessageTooLargeError as error:
            info = ErrorInfo(
                message=f"the answer cannot be delivered: {error}", code="answer_too_large"
            )
            await self._outbox.publish(command.request.reply_to or "", unsent)
            await self._fail(command, info, now)

    async def _fail(self, command: Depart, error: ErrorInfo, now: UnixTime) -> None:
        failed = RequestFailed(
            request_id=command.request.request_id,
            run_id=command.run_id,
            error=error,
            at=now,
            history=command.request.history,
        )
        await self._final(command.request, failed)
        await self._meter(command, now, outcome=error.code)

    async def _meter(
        self,
        command: Depart,
        now: UnixTime,
        *,
        usage: Usage | None = None,
        outcome: str = COMPLETED,
    ) -> None:
        """
        Publish what a final counts for its tenant, before the request is acknowledged: a request
        whose outcome is lost with this process runs again and is metered again, under its id.
        """
        request = command.request
        metered = RequestMetered(
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model.base,
            qos_class=request.slo.qos_class,
            outcome=outcome,
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            completion_tokens=0 if usage is None else usage.completion_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
            finished_at=now,
            instance_id=self._settings.instance_id,
        )
        message = OutMessage(
            body=encode(metered),
            kind=tag_of(RequestMetered),
            message_id=f"{request.request_id}/metered",
        )
        try:
            published = await publish_until_confirmed(
                self._broker, topology.TELEMETRY, topology.METERED_KEY, message
            )
        except BrokerConflictError as error:
            log.warning("usage.lost", request_id=request.request_id, error=str(error))
            return
        if published is not PublishOutcome.CONFIRMED:
            log.warning("usage.lost", request_id=request.request_id, error=published.value)

    async def _requeue(self, command: Depart, queue: str, attempts: Attempts) -> None:
        """Publish the request with its progress, without the last run's if it is too large."""
        request = command.request
        again = self._runs.with_progress(command.number, request)
        try:
            await self._queue(queue, msgspec.structs.replace(again, attempts=attempts))
        except MessageTooLargeError as error:
            log.warning("progress.dropped", request_id=request.request_id, error=str(error))
            await self._queue(queue, msgspec.structs.replace(request, attempts=attempts))

    async def renew(self, command: Renew) -> bool:
        """
        Publish a copy of a held request with its progress to the inbox of this instance.

        Returns:
            True if the broker has confirmed the copy.

        Raises:
            BrokerUnavailableError: It is unknown whether the copy was published.
            MeshError: The copy was refused.
        """
        inbox = inbox_name(self._settings.instance_id)
        if not self._is_inbox_listed:
            # From the list, a leader learns of the inbox if this instance does not return.
            await list_queue(self._broker, inbox)
            self._is_inbox_listed = True
        try:
            again = self._runs.with_progress(command.number, command.request)
            outcome = await self._publish_copy(inbox, command.number, again)
        except MessageTooLargeError as error:
            log.warning("progress.dropped", request_id=again.request_id, error=str(error))
            outcome = await self._publish_copy(inbox, command.number, command.request)
        if outcome is PublishOutcome.UNROUTABLE:
            # A leader that considers the instance dead has closed the inbox.
            await topology.declare_work_queue(self._broker, inbox)
        return outcome is PublishOutcome.CONFIRMED

    async def _publish_copy(
        self, inbox: str, number: int, request: QueuedRequest
    ) -> PublishOutcome:
        message = queued_message(request, self._clock.now())
        headers = {RENEWAL_HEADER: f"{self._settings.incarnation}/{number}"}
        return await publish_until_confirmed(
            self._broker,
            topology.LANES,
            inbox,
            replace(message, headers=headers),
            give_up_after_s=RENEW_WITHIN_S,
        )

    def renewal_of(self, delivery: Delivery) -> int | None:
        """Number of the held request of which *delivery* is a copy that this process published."""
        incarnation, _, number = str(delivery.headers.get(RENEWAL_HEADER, "")).partition("/")
        is_own = incarnation == self._settings.incarnation and number.isdecimal()
        return int(number) if is_own else None

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """
        Report an undecodable message to its producer, copy it to the dead letters and acknowledge
        it.
        """
        if delivery.message_id is not None:
            error = ErrorInfo(message=reason, type="server_error", code="dead_lettered", status=500)
            request_id = RequestId(delivery.message_id)
            failed = RequestFailed(request_id=request_id, error=error, at=self._clock.now())
            await publish_final(self._broker, failed, reply_to=delivery.reply_to)
        letter = copy_of(delivery)
        await dead_letter(self._broker, letter, queue=delivery.queue, reason=reason)
        await delivery.settle(Settlement.ACK)

    def _completed(self, command: Depart, run: Run, now: UnixTime) -> RequestCompleted:
        request, answer, prompt_tokens = command.request, run.answer, run.prompt_tokens
        final = RequestCompleted(
            request_id=request.request_id,
            run_id=run.run_id,
            instance_id=self._settings.instance_id,
            model=request.model.name,
            token_ids=(),
            text="",
            finish_reason=answer.finish_reason or FinishReason.STOP,
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=answer.num_tokens,
                total_tokens=prompt_tokens + answer.num_tokens,
                cached_tokens=answer.cached_tokens,
            ),
            timings=Timings(
                arrived_at=request.arrived_at,
                grouped_at=request.grouped_at,
                pulled_at=command.pulled_at,
                submitted_at=command.submitted_at,
                first_token_at=answer.first_token_at or now,
                finished_at=now,
                predicted_wait=request.predicted_wait,
            ),
            verdict=answer.verdict(finished_at=now),
            attempts=request.attempts,
            history=request.history,
            clamped=request.clamped,
            engine=self._settings.engine,
        )
        return answer.written_into(final)

    async def _final(self, request: QueuedRequest, final: Final) -> None:
        await publish_final(
            self._broker, final, reply_to=request.reply_to, stored_for=stored_for(request)
        )

    async def _queue(self, queue: str, request: QueuedRequest) -> None:
        """Publish a request to a work queue until the broker confirms it, and notify agents."""
        message = queued_message(request, self._clock.now())
        for delay_s in _BACKOFF.delays():
            if await self._queues.publish(queue, message) is PublishOutcome.CONFIRMED:
                break
            await asyncio.sleep(delay_s)

    async def _dead_letter(self, request: QueuedRequest, error: ErrorInfo) -> None:
        """Copy a request that cannot be served to the dead letters, together with the reason."""
        reason, letter = f"{error.code}: {error.message}", stored_message(request)
        try:
            await dead_letter(self._broker, letter, queue=request.lane, reason=reason)
        except MessageTooLargeError as too_large:  # the producer has the reason already
            log.error("dead_letter.dropped", request_id=request.request_id, error=str(too_large))


def _has_all_events(command: Depart, run: Run | None) -> bool:
    """
    Return whether the outcome makes messages that were not sent yet superfluous: a final with the
    events of a server's stream has all of them.
    """
    has_events = run is not None and isinstance(run.answer, CallAnswer) and bool(run.answer.events)
    return has_events and all(isinstance(each, Completion) for each in command.publications)


def _needs_order(command: Depart, run: Run | None) -> bool:
    """
    Return whether the tokens that were sent must precede the outcome: a stream with a gap cannot
    continue with the next run. A whole answer has all tokens.
    """
    is_streamed = run is not None and run.stream_to is not None
    return is_streamed and any(not isinstance(each, Completion) for each in command.publications)
