"""Publishes the bodies of requests, and passes the responses of engines back."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from services.gateway.call import Call
from services.gateway.disconnect import cancelled_on_disconnect
from shared.contracts.base import RequestId
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed, StepDetails
from shared.producer.generation import Generation
from shared.producer.producer import Producer

JSON = (b"content-type", b"application/json")
EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class PassThrough:
    """
    Publishes bodies as calls, and passes the responses of engines back as they are.

    Args:
        producer: Publishes the calls.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def answer(self, call: Call, endpoint: str, receive: Any, send: Any) -> None:
        """
        Answer one request, whose body is the first ASGI event.

        Raises:
            MeshError: The request cannot be published, or failed after its first token.
        """
        body = (await receive())["body"]
        generation = await self._producer.submit(
            published(call, endpoint, body),
            reply=ReplyMode.STREAM if call.stream else ReplyMode.FINAL,
            trace=call.trace,
            digest=call.digest,
        )
        async with cancelled_on_disconnect(receive, generation):
            answer = _Answer(send, generation, call)
            await (answer.stream() if call.stream else answer.whole())


def published(call: Call, endpoint: str, body: bytes) -> CallRequest:
    """The message that publishes the body of a call."""
    return CallRequest(
        endpoint=endpoint,
        body=msgspec.Raw(body),
        events=call.stream,
        model=call.model,
        id=RequestId(call.call_id),
        slo=call.slo,
        tenant=call.tenant,
        application=call.application,
        session=call.session,
        importance=call.importance,
        priority=call.priority,
        arrived_at=call.arrived_at,
        expires_at=call.ends.expires_at,
        not_before=call.ends.not_before,
        on_late=call.ends.on_late,
        clamped=call.clamped,
    )


class _Answer:
    """
    Sends the answer of an engine.

    Args:
        send: The `send` of ASGI.
        generation: The request in the mesh.
        call: Receives the result.
    """

    def __init__(self, send: Any, generation: Generation, call: Call) -> None:
        self._send = send
        self._generation = generation
        self._call = call
        self._started = False
        self._passed: Counter[int] = Counter()
        """Answer -> number of its tokens whose events were sent."""

    async def whole(self) -> None:
        """Send the response as one body."""
        final = await self._generation.final()
        if isinstance(final, RequestCompleted):
            self._call.final = final
            await self._start(200, JSON)
            await self._body(bytes(final.response or b"null"), more=False)
        else:
            await self._failed(final)

    async def stream(self) -> None:
        """
        Send the events of the stream as they come.

        Raises:
            ContractError: The request failed after its first token.
        """
        async for part in self._generation:
            self._passed[part.child] += sum(step.num_tokens for step in part.details)
            await self._pass([b"".join(_events(part.details))])
        final = await self._generation.final()
        if isinstance(final, RequestCompleted):
            self._call.final = final
            # The end of the answer, and events whose messages were lost. One by one, since the
            # mesh's results are added to one of them.
            await self._pass(_events(self._left(final.details)))
            await self._body(b"", more=False)
        elif self._started:
            error = final.error
            raise ContractError(
                error.message, code=error.code, param=error.param, status=error.status
            )
        else:
            await self._failed(final)

    def _left(self, steps: Iterable[StepDetails]) -> Iterator[StepDetails]:
        """The steps whose events were not sent; messages may be lost."""
        for step in steps:
            if self._passed[step.child] >= step.num_tokens > 0:
                self._passed[step.child] -= step.num_tokens
            else:
                yield step

    async def _failed(self, failed: RequestFailed) -> None:
        """Send the engine's refusal as it came, or the mesh's error."""
        error = failed.error
        if error.response is msgspec.UNSET:
            self._call.failure = error  # it replaces the response
        await self._start(error.status, JSON)
        await self._body(bytes(error.response or b""), more=False)

    async def _pass(self, parts: list[bytes]) -> None:
        """Send parts of the stream."""
        if not self._started:
            await self._start(200, *EVENTS)
        for part in filter(None, parts):
            await self._body(part, more=True)

    async def _start(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _events(steps: Iterable[StepDetails]) -> list[bytes]:
    """The server-sent events of *steps*, each with its end."""
    events = (event for step in steps for event in step.events.split(b"\n\n"))
    return [event + b"\n\n" for event in events if event]
