"""Producer: publishes requests to the global queues and receives their replies."""

import asyncio
from types import TracebackType
from typing import Self
from uuid import uuid4

import msgspec
import structlog

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.broker.retry import publish_until_confirmed
from shared.broker.tasks import OwnedTasks
from shared.contracts.base import RequestId, encode, tag_of
from shared.contracts.control import RequestCancel
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    CapacityError,
    ContractError,
    TransientError,
)
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import ReplyMode
from shared.producer.generation import Generation
from shared.producer.outstanding import Outstanding
from shared.producer.replies import ReplyReader
from shared.runtime.clock import Clock

log = structlog.get_logger()

REQUEST_KIND = "inference.request.v1"
"""AMQP type of a request message, whose body has no tag (as in llm-d-async)."""
TRACEPARENT_HEADER = "traceparent"
FULL_RETRY_AFTER_S = 5.0
Request = InferenceRequest | CallRequest


def routing_key(body: Request) -> str:
    """
    Routing key that selects the global queue of *body*.

    Requests with a TTFT target use the fast queue, other requests the second queue.
    """
    slo = body.slo or Slo()
    interactive = slo.qos_class is QosClass.INTERACTIVE
    return topology.INTERACTIVE_KEY if interactive else topology.REST_KEY


class Producer:
    """
    Publishes requests, and returns a `Generation` with the answer for each request.

    All requests share one reply queue; the number of requests is not limited.

    Args:
        broker: Connected client, which the producer does not close. The topology must exist.
        name: Part of the reply queue's name.
        clock: Wall time.
        user_id: Broker user of this connection, set on each request. The mesh reads the fields for
            trusted publishers only from requests of trusted users.
        reply_queue: Name of an existing reply queue, which is kept at the end; by default a new
            queue is created, and deleted at the end.
        give_up_after_s: Time limit for publishing while the broker is unavailable.
        silence_s: See `RequestAssembly`.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        name: str,
        clock: Clock,
        user_id: str | None = None,
        reply_queue: str | None = None,
        give_up_after_s: float = 5.0,
        silence_s: float = 10.0,
    ) -> None:
        self.reply_queue = reply_queue or f"reply.{name}.{uuid4().hex}"
        self._keep_queue = reply_queue is not None
        self._broker = broker
        self._clock = clock
        self._user_id = user_id
        self._give_up_after_s = give_up_after_s
        self._outstanding = Outstanding(silence_s=silence_s)
        self._replies = ReplyReader(broker, self._outstanding, clock=clock, queue=self.reply_queue)
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> Self:
        """
        Declare the reply queue and consume it.

        Raises:
            BrokerUnavailableError: The broker does not answer in time.
        """
        await self._replies.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """
        Stop the producer. Outstanding requests end as cancelled for their consumers.

        The requests are also cancelled in the mesh, unless the caller passed a reply queue, which
        can still receive their finals.
        """
        for request_id in self._outstanding.request_ids:
            if self._keep_queue:
                self._outstanding.cancel(request_id, self._clock.now())
            else:
                self._give_up(request_id)
        await self._tasks.wait()
        await self._replies.stop()
        if not self._keep_queue:
            try:
                await self._broker.delete_queue(self.reply_queue)
            except TransientError as error:
                # The reply queue expires by itself.
                log.warning("reply_queue.left", queue=self.reply_queue, error=str(error))

    @property
    def num_outstanding(self) -> int:
        """Number of requests in progress."""
        return len(self._outstanding)

    async def submit(
        self, body: Request, *, reply: ReplyMode, traceparent: str | None = None
    ) -> Generation:
        """
        Publish a request durably, and receive its replies.

        If groupers trust the publishing user, the targets of the request count from this call, not
        from the time at which a grouper reads the request.

        Args:
            body: Request body; a missing `id` or `arrived_at` is added.
            reply: Whether replies contain tokens as they are generated, or only the final.
            traceparent: W3C trace context that is sent with the request.

        Raises:
            ContractError: A request with this id is already in progress.
            CapacityError: The global queue is full.
            BrokerUnavailableError: The broker did not confirm the publish in time. If the request
                has arrived nevertheless, its runs are stopped.
        """
        request_id = RequestId(body.id or f"req-{uuid4().hex}")
        if request_id in self._outstanding:
            raise ContractError(
                f"request {request_id} is already in progress",
                code="duplicate_request",
                param="id",
                status=409,
            )
        streaming = reply is ReplyMode.STREAM
        generation = Generation(request_id, cancel=self._cancel)
        self._outstanding.add(generation, streaming=streaming)
        try:
            outcome = await publish_until_confirmed(
                self._broker,
                topology.REQUESTS,
                routing_key(body),
                self._message(body, request_id, reply, traceparent),
                give_up_after_s=self._give_up_after_s,
            )
        except BaseException:
            # The request may have reached the mesh, but its consumer no longer waits, so cancel it.
            self._give_up(request_id)
            raise
        match outcome:
            case PublishOutcome.CONFIRMED:
                return generation
            case PublishOutcome.REFUSED:
                self._outstanding.forget(request_id)
                raise CapacityError("the global queue is full", retry_after_s=FULL_RETRY_AFTER_S)
            case PublishOutcome.UNROUTABLE:
                self._outstanding.forget(request_id)
                raise BrokerUnavailableError(
                    "the global queues do not exist; has a planner been started?"
                )

    def _message(
        self,
        body: Request,
        request_id: RequestId,
        reply: ReplyMode,
        traceparent: str | None,
    ) -> OutMessage:
        # Time in the global queue counts as waiting; services downstream cannot measure it.
        arrived_at = self._clock.now() if body.arrived_at is None else body.arrived_at
        stamped = msgspec.structs.replace(body, id=request_id, reply=reply, arrived_at=arrived_at)
        return OutMessage(
            body=encode(stamped),
            kind=REQUEST_KIND,
            message_id=request_id,
            correlation_id=request_id,
            reply_to=self.reply_queue,
            headers={TRACEPARENT_HEADER: traceparent} if traceparent else {},
            user_id=self._user_id,
        )

    async def _cancel(self, request_id: RequestId) -> None:
        if (task := self._give_up(request_id)) is not None:
            # A cancelled consumer must not cancel the publish of its message.
            await asyncio.shield(task)

    def _give_up(self, request_id: RequestId) -> asyncio.Task[None] | None:
        """Drop the request, and cancel it in the mesh in the background."""
        if not self._outstanding.cancel(request_id, self._clock.now()):
            return None
        return self._tasks.spawn(self._publish_cancel(request_id), name=f"cancel {request_id}")

    async def _publish_cancel(self, request_id: RequestId) -> None:
        message = OutMessage(
            body=encode(RequestCancel(request_id=request_id, reply_to=self.reply_queue)),
            kind=tag_of(RequestCancel),
            persistent=False,
        )
        try:
            # One attempt suffices: if the cancellation is lost, each run that starts later is
            # stopped individually.
            await self._broker.publish(topology.CONTROL, topology.CONTROL_CANCEL, message)
        except (TransientError, BrokerConflictError) as error:
            log.warning("request.cancel_lost", request_id=request_id, error=str(error))
