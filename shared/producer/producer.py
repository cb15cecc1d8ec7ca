"""Producer: publishes requests to the global queues and receives their replies."""

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import Self
from uuid import uuid4

import msgspec

from shared.broker import topology
from shared.broker.protocol import Broker, HeaderValue, OutMessage, PublishOutcome
from shared.broker.retry import publish_until_confirmed
from shared.broker.tasks import OwnedTasks
from shared.contracts.base import RequestId, TenantId, encode
from shared.contracts.control import RequestCancel, StoredCancel
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    CapacityError,
    ContractError,
    MeshError,
    TransientError,
)
from shared.contracts.ingress import (
    DIGEST_HEADER,
    IDEMPOTENT_HEADER,
    CallRequest,
    InferenceRequest,
)
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import ReplyMode
from shared.producer.generation import Generation
from shared.producer.outstanding import Asked, Outstanding
from shared.producer.replies import ReplyReader
from shared.runtime.clock import Clock
from shared.runtime.events import EventLogger
from shared.tracing.context import TraceContext

log = EventLogger(__name__)

REQUEST_KIND = "inference.request.v1"
"""AMQP type of a request message, whose body has no tag (as in llm-d-async)."""
FULL_RETRY_AFTER_S = 5.0
Request = InferenceRequest | CallRequest


class _UnroutableError(BrokerUnavailableError):
    """There are no global queues, so the broker has not kept the message."""


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
        self._publishing: dict[RequestId, asyncio.Task[MeshError | None]] = {}
        """Publishes in progress of requests whose ids may be asked again."""

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
        can still receive their finals, or they have a digest, so that they can be asked again.
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
        self,
        body: Request,
        *,
        reply: ReplyMode,
        trace: TraceContext | None = None,
        digest: str | None = None,
    ) -> Generation:
        """
        Publish a request durably, and receive its replies.

        If groupers trust the publishing user, the targets of the request count from this call, not
        from the time at which a grouper reads the request.

        Args:
            body: Request body; a missing `id` or `arrived_at` is added.
            reply: Whether replies contain tokens as they are generated, or only the final.
            trace: W3C's trace context, which is sent with the request.
            digest: Digest of what is asked, if the same request may be asked again under its id,
                here or at another producer. Only the first message makes a request of the mesh; the
                others get its final. Such a request continues when its consumer leaves.

        Raises:
            ContractError: A request with this id is already in progress, and there is no digest
                (`duplicate_request`) or another one (`id_conflict`).
            CapacityError: The global queue is full.
            BrokerUnavailableError: The broker did not confirm the publish in time. If a request
                without a digest has arrived nevertheless, its runs are stopped.
        """
        request_id = RequestId(body.id or f"req-{uuid4().hex}")
        if digest is not None:
            return await self._submit_again(body, request_id, reply, trace, digest)
        if request_id in self._outstanding:
            raise ContractError(
                f"request {request_id} is already in progress",
                code="duplicate_request",
                param="id",
                status=409,
            )
        streaming = reply is ReplyMode.STREAM
        generation = Generation(request_id, cancel=self.cancel)
        self._outstanding.add(generation, streaming=streaming)
        message = self._message(body, request_id, reply, self._headers(trace))
        try:
            await self._publish(body, replace(message, reply_to=self.reply_queue))
        except (CapacityError, _UnroutableError):
            self._outstanding.forget(request_id)
            raise
        except BaseException:
            # The request may have reached the mesh, but its consumer no longer waits, so cancel it.
            self._give_up(request_id)
            raise
        return generation

    async def publish_stored(
        self, body: Request, *, digest: str, trace: TraceContext | None = None
    ) -> None:
        """
        Publish a request whose final only the store gets, durably.

        Publishing it again is harmless: what was published before under the same id continues.

        Args:
            body: Request body with an id and a tenant.
            digest: Digest of what is asked.
            trace: W3C's trace context, which is sent with the request.

        Raises:
            CapacityError: The global queue is full.
            BrokerUnavailableError: The broker did not confirm the publish in time; the request may
                have arrived nevertheless.
            ValueError: The body has no id or no tenant.
        """
        if not body.id or not body.tenant:
            raise ValueError("the store finds requests by tenant and id: both must be set")
        headers = self._headers(trace, digest)
        message = self._message(body, RequestId(body.id), ReplyMode.FINAL, headers)
        await self._publish(body, message)

    async def cancel(self, request_id: RequestId) -> None:
        """
        Cancel a request of this producer, wherever it is, also one that may be asked again.

        The request ends for its callers immediately; the call then only waits for the broker's
        answer. No-op if the request has ended.
        """
        if request_id not in self._outstanding:
            return
        task = self._give_up(request_id) or self._cancel_in_mesh(request_id)
        # A cancelled caller must not cancel the publish of its message.
        await asyncio.shield(task)

    async def cancel_stored(self, tenant: TenantId, request_id: RequestId) -> None:
        """
        Cancel a request that the store knows, wherever it is.

        Raises:
            BrokerUnavailableError: The broker did not confirm the command in time, or no queue
                receives it.
        """
        command = StoredCancel(tenant=tenant, request_id=request_id)
        message = OutMessage.transient(command, user_id=self._user_id)
        outcome = await publish_until_confirmed(
            self._broker,
            topology.CONTROL,
            topology.COMMAND_CANCEL,
            message,
            give_up_after_s=self._give_up_after_s,
        )
        if outcome is not PublishOutcome.CONFIRMED:
            raise BrokerUnavailableError(
                f"the cancellation of {request_id} reaches no queue; has a planner been started?"
            )

    async def _submit_again(
        self,
        body: Request,
        request_id: RequestId,
        reply: ReplyMode,
        trace: TraceContext | None,
        digest: str,
    ) -> Generation:
        """Submit a request that may have been submitted before under its id."""
        asked = Asked(tenant=body.tenant, digest=digest)

        async def leave(_request_id: RequestId) -> None:
            self._outstanding.leave(generation, self._clock.now())

        generation = Generation(request_id, cancel=leave)
        if not self._outstanding.join(generation, asked):
            streaming = reply is ReplyMode.STREAM
            self._outstanding.add(generation, streaming=streaming, asked=asked)
            if request_id not in self._publishing:
                headers = self._headers(trace, digest)
                message = self._message(body, request_id, reply, headers)
                self._publishing[request_id] = self._tasks.spawn(
                    self._publish_for_all(body, replace(message, reply_to=self.reply_queue)),
                    name=f"publish {request_id}",
                )
        if (publishing := self._publishing.get(request_id)) is not None:
            try:
                # A caller that leaves does not stop the publish, which others may wait for.
                error = await asyncio.shield(publishing)
            except asyncio.CancelledError:
                self._outstanding.leave(generation, self._clock.now())
                raise
            if error is not None:
                raise error
        return generation

    async def _publish_for_all(self, body: Request, message: OutMessage) -> MeshError | None:
        """Publish a request for all its callers; return the error that they all get."""
        request_id = RequestId(message.message_id or "")
        try:
            await self._publish(body, message)
        except MeshError as error:
            self._outstanding.forget(request_id)
            return error
        finally:
            del self._publishing[request_id]
        return None

    async def _publish(self, body: Request, message: OutMessage) -> None:
        """
        Publish a message to the global queue of *body*.

        Raises:
            CapacityError: The queue is full.
            BrokerUnavailableError: The broker did not confirm the publish in time.
        """
        outcome = await publish_until_confirmed(
            self._broker,
            topology.REQUESTS,
            routing_key(body),
            message,
            give_up_after_s=self._give_up_after_s,
        )
        match outcome:
            case PublishOutcome.CONFIRMED:
                return
            case PublishOutcome.REFUSED:
                raise CapacityError("the global queue is full", retry_after_s=FULL_RETRY_AFTER_S)
            case PublishOutcome.UNROUTABLE:
                raise _UnroutableError(
                    "the global queues do not exist; has a planner been started?"
                )

    def _headers(
        self, trace: TraceContext | None, digest: str | None = None
    ) -> dict[str, HeaderValue]:
        headers: dict[str, HeaderValue] = {}
        if trace is not None:
            headers |= trace.headers
        if digest is not None:
            headers |= {IDEMPOTENT_HEADER: True, DIGEST_HEADER: digest}
        return headers

    def _message(
        self,
        body: Request,
        request_id: RequestId,
        reply: ReplyMode,
        headers: dict[str, HeaderValue],
    ) -> OutMessage:
        """The message of a request, without a reply queue."""
        # Time in the global queue counts as waiting; services downstream cannot measure it.
        arrived_at = self._clock.now() if body.arrived_at is None else body.arrived_at
        stamped = msgspec.structs.replace(body, id=request_id, reply=reply, arrived_at=arrived_at)
        return OutMessage(
            body=encode(stamped),
            kind=REQUEST_KIND,
            message_id=request_id,
            correlation_id=request_id,
            headers=headers,
            user_id=self._user_id,
        )

    def _give_up(self, request_id: RequestId) -> asyncio.Task[None] | None:
        """
        Drop the request, and cancel it in the mesh in the background, unless it may be asked again.
        """
        if not self._outstanding.cancel(request_id, self._clock.now()):
            return None
        return self._cancel_in_mesh(request_id)

    def _cancel_in_mesh(self, request_id: RequestId) -> asyncio.Task[None]:
        return self._tasks.spawn(self._publish_cancel(request_id), name=f"cancel {request_id}")

    async def _publish_cancel(self, request_id: RequestId) -> None:
        cancel = RequestCancel(request_id=request_id, reply_to=self.reply_queue)
        try:
            await publish_until_confirmed(
                self._broker,
                topology.CONTROL,
                topology.CONTROL_CANCEL,
                OutMessage.transient(cancel),
                give_up_after_s=self._give_up_after_s,
            )
        except (TransientError, BrokerConflictError) as error:
            log.warning("request.cancel_lost", request_id=request_id, error=str(error))
