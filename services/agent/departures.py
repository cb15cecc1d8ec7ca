"""Outcomes of requests: each is published and confirmed before its deliveries are acknowledged."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from services.agent.answer import AnswerStream
from services.agent.backends.base import EngineIdentity
from services.agent.metrics import COMPLETED
from services.agent.outbox import Outbox
from services.agent.runs import Run, Runs
from shared.broker import topology
from shared.broker.finals import publish_final, stored_for
from shared.broker.protocol import (
    Broker,
    Delivery,
    HeaderValue,
    OutMessage,
    PublishOutcome,
    Settlement,
)
from shared.broker.queue_list import list_queue
from shared.broker.retry import Backoff, publish_until_confirmed, publish_until_routed
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, RequestId, UnixTime, encode, tag_of
from shared.contracts.checks import prompt_text
from shared.contracts.ends import expiration_s
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
from shared.contracts.telemetry import RequestObserved
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
        incarnation: Unique id of the process.
        identity: Engine and device, written into final replies and observations.
        observe: Receives one observation per finished request.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        queues: WorkQueues,
        outbox: Outbox,
        runs: Runs,
        instance_id: InstanceId,
        incarnation: str,
        identity: EngineIdentity,
        observe: Callable[[RequestObserved], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._broker = broker
        self._queues = queues
        self._outbox = outbox
        self._runs = runs
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._is_inbox_listed = False
        self._identity = identity
        self._observe = observe
        self._clock = clock

    async def publish(self, command: Depart) -> UnixTime:
        """Publish all messages of an outcome, in order; return the time of the outcome."""
        request, now = command.request, self._clock.now()
        run = self._runs.last(command.number)
        if request.reply_to is not None:
            await self._outbox.flush_confirmed(request.reply_to)
        for publication in command.publications:
            match publication:
                case Completion() if run is not None:
                    await self._answer(command, run, now)
                case Failure(error=error):
                    await self._fail(command, error, now)
                case DeadLetter(error=error):
                    await self._dead_letter(request, error)
                case Requeueing(queue=queue, attempts=attempts):
                    await self._requeue(command, queue, attempts)
        return now

    async def observe(self, command: Depart, now: UnixTime) -> None:
        """
        Log an outcome that was published, and report a finished request.

        Args:
            now: Time of the outcome, which its final reply has also.
        """
        request, run = command.request, self._runs.last(command.number)
        num_tokens = run.answer.num_tokens if run is not None else 0
        fields = {
            "request_id": request.request_id,
            "model": request.model.base,
            "tenant": request.tenant,
            "hop": request.attempts.hop,
            "tokens": num_tokens,
        }
        if not command.publications:
            log.info("run.stopped", **fields)
        for publication in command.publications:
            match publication:
                case Completion() if run is not None:
                    observed = self._observation(command, run, now, COMPLETED)
                    log.info(
                        "request.completed",
                        **fields,
                        ttft_s=round((run.answer.first_token_at or now) - request.arrived_at, 4),
                        ttlt_s=round(now - request.arrived_at, 4),
                        attained=observed.attained,
                    )
                    await self._observe(observed)
                case Failure(error=error):
                    log.info("request.failed", **fields, code=error.code)
                    await self._observe(self._observation(command, run, now, error.code))
                case Requeueing(queue=queue):
                    log.info("request.requeued", **fields, how=command.how, queue=queue)

    async def _answer(self, command: Depart, run: Run, now: UnixTime) -> None:
        """Publish the final reply; if the broker refuses its size, one that says so."""
        try:
            completed = self._completed(command, run, now)
            await self._final(command.request, completed)
            await self._meter(command, now, usage=completed.usage)
        except MessageTooLargeError as error:
            info = ErrorInfo(
                message=f"the answer cannot be delivered: {error}", code="answer_too_large"
            )
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
            instance_id=self._instance_id,
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
        inbox = inbox_name(self._instance_id)
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
        headers: dict[str, HeaderValue] = {RENEWAL_HEADER: f"{self._incarnation}/{number}"}
        return await publish_until_confirmed(
            self._broker,
            topology.LANES,
            inbox,
            _message_of(request, headers, now=self._clock.now()),
            give_up_after_s=RENEW_WITHIN_S,
        )

    def renewal_of(self, delivery: Delivery) -> int | None:
        """Number of the held request of which *delivery* is a copy that this process published."""
        incarnation, _, number = str(delivery.headers.get(RENEWAL_HEADER, "")).partition("/")
        return int(number) if incarnation == self._incarnation and number.isdecimal() else None

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
        message = OutMessage(
            body=delivery.body,
            kind=delivery.kind,
            message_id=delivery.message_id,
            reply_to=delivery.reply_to,
            headers={topology.REASON_HEADER: reason[:500], "headway-queue": delivery.queue},
        )
        await publish_until_routed(self._broker, topology.DEAD, delivery.queue, message)
        await delivery.settle(Settlement.ACK)

    def _completed(self, command: Depart, run: Run, now: UnixTime) -> RequestCompleted:
        request, answer, prompt_tokens = command.request, run.answer, run.prompt_tokens
        final = RequestCompleted(
            request_id=request.request_id,
            run_id=run.run_id,
            instance_id=self._instance_id,
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
            engine=self._identity.engine,
        )
        return answer.written_into(final)

    def _observation(
        self, command: Depart, run: Run | None, now: UnixTime, outcome: str
    ) -> RequestObserved:
        request = command.request
        answer = run.answer if run is not None else AnswerStream(request)
        counted = run.prompt_tokens if run is not None and outcome == COMPLETED else 0
        return RequestObserved(
            request_id=request.request_id,
            instance_id=self._instance_id,
            model=request.model.base,
            engine=self._identity.engine,
            device=self._identity.device,
            application=request.application,
            tenant=request.tenant,
            qos_class=request.slo.qos_class,
            prompt_tokens=counted or request.prompt_tokens,
            # The mean of a call's answers: lengths of single answers are predicted from it.
            output_tokens=answer.num_tokens // request.num_answers,
            arrived_at=request.arrived_at,
            pulled_at=command.pulled_at,
            submitted_at=command.submitted_at,
            first_token_at=answer.first_token_at or 0.0,
            finished_at=now,
            attained=outcome == COMPLETED and answer.verdict(finished_at=now).attained,
            outcome=outcome,
            evictions=request.attempts.evictions,
            crashes=request.attempts.crashes,
            cached_tokens=answer.cached_tokens,
            relegated=request.attempts.relegated,
            max_tbt_s=answer.max_tbt_s,
            prompt_text=prompt_text(request) if counted else None,
            finish_reason=answer.finish_reason,
            max_tokens=request.sampling.max_tokens // request.num_answers,
            ignore_eos=request.sampling.ignore_eos,
            grouped_at=request.grouped_at,
            predicted_wait=request.predicted_wait,
        )

    async def _final(self, request: QueuedRequest, final: Final) -> None:
        await publish_final(
            self._broker, final, reply_to=request.reply_to, stored_for=stored_for(request)
        )

    async def _queue(self, queue: str, request: QueuedRequest) -> None:
        """Publish a request to a work queue until the broker confirms it, and notify agents."""
        message = _message_of(request, now=self._clock.now())
        for delay_s in _BACKOFF.delays():
            if await self._queues.publish(queue, message) is PublishOutcome.CONFIRMED:
                break
            await asyncio.sleep(delay_s)
        await self._queues.notify(queue)

    async def _dead_letter(self, request: QueuedRequest, error: ErrorInfo) -> None:
        """Copy a request that cannot be served to the dead letters, together with the reason."""
        reason = f"{error.code}: {error.message}"[:500]
        headers: dict[str, HeaderValue] = {
            topology.REASON_HEADER: reason,
            "headway-queue": request.lane,
        }
        message = _message_of(request, headers)
        try:
            await publish_until_routed(self._broker, topology.DEAD, request.lane, message)
        except MessageTooLargeError as too_large:  # the producer has the reason already
            log.error("dead_letter.dropped", request_id=request.request_id, error=str(too_large))


def _message_of(
    request: QueuedRequest,
    headers: dict[str, HeaderValue] | None = None,
    *,
    now: UnixTime | None = None,
) -> OutMessage:
    """
    The message with a request; in a work queue, where it is published *now*, it lasts to its end.
    """
    return OutMessage(
        body=encode(request),
        kind="request.queued.v1",
        message_id=request.request_id,
        correlation_id=request.request_id,
        reply_to=request.reply_to,
        headers=headers or {},
        expiration_s=None if now is None else expiration_s(request, now),
    )
