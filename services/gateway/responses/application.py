"""Stored responses in the gateway's HTTP interface."""

import asyncio
from contextlib import aclosing
from typing import Any

import structlog

from services.gateway.admission import read_ahead
from services.gateway.body import Forwarded
from services.gateway.channel import UnreadError
from services.gateway.disconnect import disconnected
from services.gateway.outcomes import Outcome
from services.gateway.resources import ResourceCall, Routes, WithResources
from services.gateway.responses.asked import front_body, names_the_store, parse_asked
from services.gateway.responses.feed import Feed
from services.gateway.responses.objects import (
    ResponseDeleted,
    input_page,
    parse_starting_after,
    parse_stream,
    sse,
)
from services.gateway.responses.run import PATH, Refusal
from services.gateway.responses.service import Created, Responses
from services.gateway.state import Gateway
from shared.contracts.errors import MeshError
from shared.contracts.tenants.keys import Scope
from shared.store.objects.responses import StoredResponse

log = structlog.get_logger()

PASSED_HEADERS = ("content-type", "retry-after")
"""Headers of the front's refusal that the client gets."""


class ResponsesResource:
    """
    Answers requests to `/v1/responses/{id}`; the collection belongs to the front.

    Args:
        gateway: Components that all requests share.
        responses: The stored responses; None without a store.
    """

    root = PATH
    name = "stored_responses"
    scope = Scope.INFERENCE

    def __init__(self, gateway: Gateway, responses: Responses | None) -> None:
        self._gateway = gateway
        self._responses = responses
        self.routes: Routes = {
            "{id}": {"GET": self._get, "DELETE": self._delete},
            "{id}/cancel": {"POST": self._cancel},
            "{id}/input_items": {"GET": self._input_items},
        }

    async def _get(self, call: ResourceCall) -> Outcome:
        after = parse_starting_after(call.query)
        response = await self._usable().get(call.tenant, call.object_id)
        if parse_stream(call.query):
            return await stream(self._usable().feed, call, response, after=after)
        return await _object(call, response)

    async def _delete(self, call: ResourceCall) -> Outcome:
        await self._usable().delete(call.tenant, call.object_id)
        return await call.answer(ResponseDeleted(id=call.object_id))

    async def _cancel(self, call: ResourceCall) -> Outcome:
        return await _object(call, await self._usable().cancel(call.tenant, call.object_id))

    async def _input_items(self, call: ResourceCall) -> Outcome:
        responses = self._usable()
        response = await responses.get(call.tenant, call.object_id)
        turns = await responses.turns_before(response)
        return await call.answer(input_page(response, turns, call.query))

    def _usable(self) -> Responses:
        return usable(self._gateway, self._responses)


class CreationResource:
    """
    Answers `POST /v1/responses` with fields of the store.

    Args:
        gateway: Components that all requests share.
        responses: The stored responses; None without a store.
    """

    root = PATH
    name = "stored_responses"
    scope = Scope.INFERENCE

    def __init__(self, gateway: Gateway, responses: Responses | None) -> None:
        self._gateway = gateway
        self._responses = responses
        self.routes: Routes = {"": {"POST": self._create}}

    async def _create(self, call: ResourceCall) -> Outcome:
        body = await call.body()
        responses = usable(self._gateway, self._responses)
        created = await _created(responses, call, body)
        if created is None:
            return Outcome.CANCELLED
        response = created.response
        if created.refusal is not None:
            return await _refused(call, created.refusal)
        log.info("response.created", response_id=response.id, tenant=response.tenant)
        if created.asked.stream:
            outcome = await stream(responses.feed, call, response, after=-1)
        elif response.is_background:
            return await _object(call, response)
        else:
            outcome = await self._whole(responses, call, created)
        if outcome is Outcome.CANCELLED:
            await responses.abandon(response, call.headers)
        return outcome

    async def _whole(self, responses: Responses, call: ResourceCall, created: Created) -> Outcome:
        """Answer with the response when it has ended."""
        response = created.response
        ended = responses.feed.ended(response.id)
        if not await _before_disconnection(call, ended, name=f"end of {response.id}"):
            return Outcome.CANCELLED
        return await _object(call, await responses.get(call.tenant, response.id))


class StoredResponses:
    """
    ASGI application that stores those responses of which a request asks it, and passes all other
    requests to *front*.

    Args:
        gateway: Components that all requests share.
        responses: The stored responses; None without a store.
        front: Application of the front.
    """

    def __init__(self, gateway: Gateway, responses: Responses | None, front: Any) -> None:
        self._gateway = gateway
        self._responses = responses
        self._front = front
        self._creation = WithResources(gateway, (CreationResource(gateway, responses),), front)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request; only bodies of `POST /v1/responses` are read here."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != PATH:
            await self._front(scope, receive, send)
            return
        async with read_ahead(self._gateway, scope, receive) as (request, body):
            application = self._front
            if names_the_store(body):
                application = self._continuing if self._continues_only(body) else self._creation
            await application(request.scope, request.receive, send)

    def _continues_only(self, body: bytes) -> bool:
        """True if *body* continues a stored response, and shall not be stored itself."""
        try:
            asked = parse_asked(body)
        except MeshError:
            return False  # refused at the creation
        return asked.previous_response_id is not None and asked.store is False

    async def _continuing(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on with the turns that it continues."""
        resource = _Continuation(self._gateway, self._responses, self._front, send)
        await WithResources(self._gateway, (resource,), self._front)(scope, receive, send)


class _Continuation:
    """Resource that passes one request to the front, with earlier turns in its input."""

    root = PATH
    name = "stored_responses"
    scope = Scope.INFERENCE

    def __init__(
        self,
        gateway: Gateway,
        responses: Responses | None,
        front: Any,
        send: Any,
    ) -> None:
        self._gateway = gateway
        self._responses = responses
        self._front = front
        self._send = send
        self.routes: Routes = {"": {"POST": self._continue}}

    async def _continue(self, call: ResourceCall) -> Outcome:
        body = await call.body()
        previous = parse_asked(body).previous_response_id or ""
        turns = await usable(self._gateway, self._responses).turns(call.tenant, previous)
        request = Forwarded(call.scope, call.receive, front_body(body, turns, stream=None))
        call.channel.started = True
        await self._front(request.scope, request.receive, self._send)
        return Outcome.COMPLETED


def usable(gateway: Gateway, responses: Responses | None) -> Responses:
    """
    The stored responses.

    Raises:
        ContractError: The gateway has no store.
        StoreUnavailableError: The store cannot be used now.
    """
    gateway.usable_store()
    assert responses is not None  # noqa: S101 - a gateway with a store has them
    return responses


async def stream(
    feed: Feed, call: ResourceCall, response: StoredResponse, *, after: int
) -> Outcome:
    """Send the events with numbers above *after*, those to come as well."""

    async def send() -> None:
        async with aclosing(feed.follow(response.id, after=after)) as batches:
            async for events in batches:
                await call.channel.event(sse(events))
        if not call.channel.started:
            await call.channel.event(b"")
        await call.channel.end()

    try:
        is_sent = await _before_disconnection(call, send(), name=f"events of {response.id}")
    except UnreadError as error:
        log.info("response.unread", response_id=response.id, error=str(error))
        is_sent = False
    return Outcome.COMPLETED if is_sent else Outcome.CANCELLED


async def _created(responses: Responses, call: ResourceCall, body: bytes) -> Created | None:
    """Create a response; None if the client disconnects before its answer begins."""
    found: list[Created] = []

    async def create() -> None:
        found.append(await responses.create(call.tenant, body, call.headers))

    await _before_disconnection(call, create(), name="creation of a response")
    return found[0] if found else None


async def _before_disconnection(call: ResourceCall, work: Any, *, name: str) -> bool:
    """Do *work* unless the client disconnects; return whether it is done."""
    left = asyncio.create_task(disconnected(call.receive), name=f"client of {name}")
    doing = asyncio.create_task(work, name=name)
    try:
        await asyncio.wait({left, doing}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        await doing
    finally:
        left.cancel()
        doing.cancel()
        await asyncio.wait({left, doing})
    return True


async def _object(call: ResourceCall, response: StoredResponse) -> Outcome:
    await call.channel.json(response.object)
    return Outcome.COMPLETED


async def _refused(call: ResourceCall, refusal: Refusal) -> Outcome:
    """Pass the front's refusal on as it came."""
    headers = {name: refusal.headers[name] for name in PASSED_HEADERS if name in refusal.headers}
    await call.channel.json(refusal.body, status=refusal.status or 500, headers=headers)
    return Outcome.REFUSED
