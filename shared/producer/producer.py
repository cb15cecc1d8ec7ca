"""A producer: publishes requests to the global queue and follows their replies."""

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
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import ReplyMode
from shared.producer.generation import Generation
from shared.producer.outstanding import Outstanding
from shared.producer.replies import ReplyReader
from shared.runtime.clock import Clock

log = structlog.get_logger()

REQUEST_KIND = "inference.request.v1"
"""AMQP type of a request message; its body carries no tag, as llm-d-async's does not."""
TRACEPARENT_HEADER = "traceparent"
FULL_RETRY_AFTER_S = 5.0


def routing_key(body: InferenceRequest) -> str:
    """The fast queue for requests with a first-token target, the other for the rest."""
    slo = body.slo or Slo()
    interactive = slo.qos_class is QosClass.INTERACTIVE
    return topology.INTERACTIVE_KEY if interactive else topology.REST_KEY


class Producer:
    """
    Publishes requests and gives each a `Generation` to read its answer from.

    Any number of requests may be outstanding; one reply queue serves them all.

    Args:
        broker: Connected; outlives the producer. The topology must exist.
        name: Part of the reply queue's name.
        clock: Wall time.
        user_id: The broker user that this connection logged in as: stamped on each request, it
            is what makes the mesh believe the fields that only trusted publishers may set.
        reply_queue: Name of a reply queue to use, and to keep at the end; by default a fresh
            one, deleted at the end.
        give_up_after_s: How long to try to publish while the broker is away.
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
        Declare the reply queue and follow it.

        Raises:
            BrokerUnavailableError: No answer in time.
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
        End. Requests still outstanding fail as cancelled for their consumers.

        They are cancelled in the mesh too, unless a reply queue of the caller's can still take
        their finals.
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
                # It expires by itself.
                log.warning("reply_queue.left", queue=self.reply_queue, error=str(error))

    @property
    def num_outstanding(self) -> int:
        """Requests published and not finished."""
        return len(self._outstanding)

    async def submit(
        self, body: InferenceRequest, *, reply: ReplyMode, traceparent: str | None = None
    ) -> Generation:
        """
        Publish a request, durably, and follow its replies.

        Its targets count from now, whenever a grouper gets to see it: as long as groupers trust
        the user that publishes.

        Args:
            body: With an `id` and an `arrived_at` of its own, or else given them.
            reply: Tokens as they come, or the final only.
            traceparent: W3C trace context to hand on.

        Raises:
            ContractError: A request with this id is already on its way.
            CapacityError: The global queue is full.
            BrokerUnavailableError: Not confirmed in time. Should it have arrived after all, its
                runs are stopped.
        """
        request_id = RequestId(body.id or f"req-{uuid4().hex}")
        if request_id in self._outstanding:
            raise ContractError(
                f"request {request_id} is already on its way",
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
            # Whether it arrived is unknown: nobody waits for it, so it is given up.
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
                raise BrokerUnavailableError("the mesh's queues are not there (yet)")

    def _message(
        self,
        body: InferenceRequest,
        request_id: RequestId,
        reply: ReplyMode,
        traceparent: str | None,
    ) -> OutMessage:
        # What waits in the global queue has arrived: nobody downstream can tell since when.
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
            # The consumer's own cancellation must not take the message back.
            await asyncio.shield(task)

    def _give_up(self, request_id: RequestId) -> asyncio.Task[None] | None:
        """Expect nothing more of the request and tell the mesh, in the background."""
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
            # One try: should it get lost, each run that starts later is stopped on its own.
            await self._broker.publish(topology.CONTROL, topology.CONTROL_CANCEL, message)
        except (TransientError, BrokerConflictError) as error:
            log.warning("request.cancel_lost", request_id=request_id, error=str(error))
