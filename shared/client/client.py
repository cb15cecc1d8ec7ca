"""The client for asyncio."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from shared.api.digests import body_digest
from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.amqp.connection import broker_user
from shared.broker.amqp.nodes import Nodes
from shared.broker.protocol import Broker, PublishOutcome
from shared.broker.rpc import ask
from shared.client.bodies import body_of, reply_mode
from shared.client.errors import RequestError
from shared.contracts.base import Decoder, Message, RequestId, encode
from shared.contracts.errors import (
    BrokerUnavailableError,
    ContractError,
    QueueNotFoundError,
)
from shared.contracts.requests import RequestCompleted, RequestFailed
from shared.contracts.stored import RequestAsked, RequestStatus
from shared.producer.effects import NewTokens
from shared.producer.generation import Generation
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from shared.tracing.context import TraceContext

STATUS_TIMEOUT_S = topology.QUESTION_TTL_S
GIVE_UP_AFTER_S = 60.0
"""Default time limit for publishing a request while the broker is unavailable."""
_decode_status: Decoder[RequestStatus] = Decoder(RequestStatus)


class Answer:
    """
    The answer to a submitted request, for one reader.

    Each token comes once, also if the request is evicted, its instance dies, the broker restarts
    or replies are delivered twice.

    Args:
        generation: The request in progress.
        producer: Producer that has published the request.
    """

    def __init__(self, generation: Generation, producer: Producer) -> None:
        self._generation = generation
        self._producer = producer

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._generation.request_id

    async def stream(self) -> AsyncIterator[NewTokens]:
        """
        Yield the parts of the answer as they arrive, with `token_ids`, `text` and `child`, the
        index of the answer if the request has several. The parts together equal the final.

        With the field `reply: final`, all parts come at the end.

        Raises:
            RequestError: The request has ended without its whole answer.
            RunDivergedError: A repeated run has generated other tokens than those that were
                yielded, so the stream cannot continue; `wait` still returns the whole answer.
        """
        async for part in self._generation:
            yield part
        await self.wait()

    async def wait(self, timeout_s: float | None = None) -> RequestCompleted:
        """
        Wait for the end of the request.

        Args:
            timeout_s: Time limit in seconds; None: no limit.

        Returns:
            The final: `text` and `token_ids`, or `response` (bytes of JSON) for a request with an
            `endpoint`; `usage`, `timings` in Unix seconds, `verdict`.

        Raises:
            RequestError: The request has ended without its whole answer.
            TimeoutError: The time limit has passed; the request continues.
            ContractError: The time limit is negative, infinite or not a number.
        """
        limit_s = None if timeout_s is None else _checked_time_limit("timeout_s", timeout_s)
        async with asyncio.timeout(limit_s):
            final = await self._generation.final()
        if isinstance(final, RequestFailed):
            raise RequestError(final.error)
        return final

    async def cancel(self) -> None:
        """
        Cancel the request, wherever it is; `stream` and `wait` raise `RequestError` with the code
        `cancelled`. Does nothing if the request has ended.
        """
        await self._producer.cancel(self._generation.request_id)


class Client:
    """
    A connection to the mesh; `connect` opens it.

    Args:
        broker: Connected client of the broker.
        producer: Producer on this broker.
        user_id: Broker user of the connection.
    """

    def __init__(self, broker: Broker, producer: Producer, *, user_id: str) -> None:
        self._broker = broker
        self._producer = producer
        self._user_id = user_id

    async def submit(
        self, *, idempotent: bool = False, traceparent: str | None = None, **fields: Any
    ) -> Answer:
        """
        Publish a request durably: when this method returns, the broker has the request.

        Args:
            idempotent: True: `id` stands for one request. To submit it again, here or elsewhere,
                returns its answer and never runs it twice, and `status` knows it; it continues
                when this client closes. The mesh needs a store.
            traceparent: W3C trace context that is sent with the request.
            fields: Fields of the request: `model` and `prompt` or `messages`, or `endpoint` and
                `body`; `max_tokens`, `slo` and others.

        Raises:
            ContractError: A field is unknown or has a wrong value, or a request with this `id` is
                in progress here.
            CapacityError: The broker's queue of requests is full; `retry_after_s` says when to try
                again.
            BrokerUnavailableError: The broker did not confirm the request in time, or the mesh has
                not been started.
        """
        body = body_of(fields)
        digest = None
        if idempotent:
            if not body.id:
                raise ContractError("an idempotent request needs an id", param="id")
            digest = body_digest(encode(body))
        trace = None if traceparent is None else TraceContext(traceparent=traceparent)
        generation = await self._producer.submit(
            body, reply=reply_mode(body), trace=trace, digest=digest
        )
        return Answer(generation, self._producer)

    async def status(
        self, request_id: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> RequestStatus:
        """
        Ask how far an idempotent request of this user has come.

        Args:
            request_id: Its id.
            timeout_s: Time limit for the answer in seconds.

        Returns:
            `state`, times in Unix seconds as far as they are known, and `final` (bytes of JSON)
            after the end.

        Raises:
            RequestError: The mesh does not know the request (`request_not_found`), has no store
                (`store_not_configured`), or cannot use it now (`store_unavailable`).
            BrokerUnavailableError: No planner has answered in time.
            ContractError: The time limit is negative, infinite or not a number.
        """

        def question(reply_to: str) -> Message:
            return RequestAsked(request_id=RequestId(request_id), reply_to=reply_to)

        answer = await ask(
            self._broker,
            topology.CONTROL_REQUEST,
            question,
            _decode_status,
            timeout_s=_checked_time_limit("timeout_s", timeout_s),
            user_id=self._user_id,
        )
        if answer is None or isinstance(answer, PublishOutcome):
            raise BrokerUnavailableError("no planner has answered in time; is the mesh running?")
        if answer.problem is not None:
            raise RequestError(answer.problem)
        return answer


@asynccontextmanager
async def connect(
    url: str, *, name: str = "client", give_up_after_s: float = GIVE_UP_AFTER_S
) -> AsyncIterator[Client]:
    """
    Context with a client. Lost connections are restored in the background.

    At the end, requests in progress are cancelled, except idempotent ones.

    Args:
        url: `amqp://user:password@host:port/vhost`, or `amqps://`; for several nodes of a broker, a
            list separated by commas. The user is the tenant.
        name: Name of the connections and part of the reply queue's name, for operators.
        give_up_after_s: Time limit in seconds for publishing a request while the broker is
            unavailable.

    Raises:
        SettingsError: The URL is invalid, or the broker refuses the login or the virtual host.
        BrokerUnavailableError: The broker does not answer, or the mesh has not been started.
        BrokerAccessError: The user has no right to the reply queue.
        ContractError: A time limit is negative, infinite or not a number.
    """
    user_id = broker_user(Nodes(url).login)
    _checked_time_limit("give_up_after_s", give_up_after_s)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(AmqpBroker(url, client_name=name))
        producer = Producer(
            broker,
            name=name,
            clock=SystemClock(),
            user_id=user_id,
            give_up_after_s=give_up_after_s,
        )
        try:
            await stack.enter_async_context(producer)
        except QueueNotFoundError as error:
            raise BrokerUnavailableError(
                "the mesh's exchanges do not exist; has a planner been started?"
            ) from error
        yield Client(broker, producer, user_id=user_id)


def _checked_time_limit(name: str, value: float) -> float:
    """
    *value* of the option *name*.

    Raises:
        ContractError: It is negative, infinite or not a number.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ContractError(
            f"{name} is {value}; it must be a finite number of seconds, at least 0", param=name
        )
    return value
