"""One response as this gateway runs it: from the call to the front to its last stored event."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import structlog

from services.gateway.headers import IDEMPOTENCY_KEY
from services.gateway.responses.asked import check_turns, front_body
from services.gateway.responses.feed import Feed
from services.gateway.responses.inner_call import InnerAnswer, inner_call
from services.gateway.responses.objects import decoded, ending_of, shown_event
from services.gateway.responses.writer import EventWriter, RunLostError
from services.gateway.webhooks.settings import WebhookSettings
from shared.contracts.base import Seconds, TenantId
from shared.contracts.errors import ContractError, StoreFullError, StoreUnavailableError
from shared.contracts.requests import ErrorInfo
from shared.contracts.tenants.policies import QUOTA_SPENT
from shared.runtime.clock import Clock
from shared.runtime.tasks import pause
from shared.store.group_commit import GroupCommit
from shared.store.objects.responses import Appended, ResponseRows, StoredResponse
from solver.storage.remaining_events import (
    Continuation,
    StreamDivergedError,
    events_of,
)
from solver.storage.response_events import ENDS

log = structlog.get_logger()

PATH = "/v1/responses"
AGAIN_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
AGAIN_CODES = frozenset(
    {"timeout", "over_capacity", "mesh_unavailable", "model_not_ready", "store_unavailable"}
)
"""Codes of failures after which the mesh is asked again: the request itself may still succeed."""
AGAIN_TYPE = "rate_limit_error"
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
LONGEST_S: Seconds = 24 * 3600.0
"""Time after which a response fails that the mesh has not taken."""
MAX_BROKEN = 5
"""Number of answers that may break off; those that ended with an error are not among them."""
BROKEN = ErrorInfo(message="the answer broke off", code="server_error", status=502)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of the front that is not one of the model."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def info(self) -> ErrorInfo:
        """The error that the body has."""
        return _info_of(_decoded(self.body), status=self.status)

    @property
    def retry_after_s(self) -> Seconds:
        """Time that the front asks for."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() else FIRST_RETRY_S


@dataclass(frozen=True, slots=True)
class _Again:
    """The mesh did not take the request, or its answer broke off."""

    after_s: Seconds
    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTools:
    """What all runs of a gateway share."""

    rows: ResponseRows
    feed: Feed
    front: Any
    """ASGI application of the front."""
    commits: GroupCommit[Appended, bool]
    webhooks: WebhookSettings
    cancel: Callable[[TenantId, str], Awaitable[None]]
    """Cancels in the mesh the request with this idempotency key."""
    clock: Clock
    stop: asyncio.Event
    """Set when the gateway stops; then no call is made again."""


class ResponseRun:
    """
    Runs one response.

    Args:
        response: The response, which this gateway holds.
        tools: What all runs share.
        is_new: False if another gateway ran it before.
    """

    def __init__(self, response: StoredResponse, tools: RunTools, *, is_new: bool) -> None:
        self.response = response
        self.begun: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        """
        None when the answer begins, or the refusal. While the creator of the response waits for it,
        a refused response is removed; else it fails.
        """
        self._tools = tools
        if not is_new:
            self.begun.set_result(None)

    async def run(self) -> None:
        """Run the response to its end, or until it is lost or the gateway stops."""
        tools, failures, broken = self._tools, 0, 0
        try:
            while (again := await self._attempt()) is not None:
                failures += 1
                broken += again.error is BROKEN
                age_s = tools.clock.now() - self.response.created_at
                if age_s > LONGEST_S or broken >= MAX_BROKEN:
                    await self._fail(again.error)
                    return
                delay_s = min(again.after_s * 2.0 ** min(failures - 1, 10), LONGEST_RETRY_S)
                log.info(
                    "response.waiting",
                    response_id=self.response.id,
                    error=again.error.message,
                    delay_s=delay_s,
                )
                if await pause(tools.stop, delay_s):
                    return
        except RunLostError as error:
            log.info("response.lost", response_id=self.response.id, error=str(error))
        finally:
            self._begin(None)

    async def _attempt(self) -> _Again | None:
        """Ask the mesh once; None if the response has ended or was refused."""
        response, rows = self.response, self._tools.rows
        try:
            sent = decoded(await rows.events(response.id))
            body = await self._body()
        except (StoreUnavailableError, StoreFullError) as error:
            info = ErrorInfo(message=str(error), code="store_unavailable", status=503)
            return _Again(FIRST_RETRY_S, info)
        except ContractError as error:
            await self._fail(ErrorInfo(message=str(error), code=error.code, status=error.status))
            return None
        headers = msgspec.json.decode(response.headers, type=dict[str, str])
        headers[IDEMPOTENCY_KEY] = response.id
        async with inner_call(
            self._tools.front, path=PATH, body=body, headers=headers, tenant=response.tenant
        ) as answer:
            await answer.begin()
            if answer.status != HTTPStatus.OK:
                refusal = Refusal(answer.status, answer.headers, await answer.whole())
                return await self._refused(refusal)
            try:
                return await self._stored(answer, Continuation(sent))
            except StreamDivergedError as error:
                log.error("response.diverged", response_id=response.id, error=str(error))
                await self._fail(ErrorInfo(message=str(error), code=error.code, status=502))
                return None

    async def _stored(self, answer: InnerAnswer, continuation: Continuation) -> _Again | None:
        """Store the events of *answer* that are missing."""
        tools = self._tools
        writer = EventWriter(self.response, tools.commits, tools.feed, tools.webhooks)
        writing = asyncio.create_task(writer.run(), name=f"writer of {self.response.id}")
        reading = asyncio.create_task(
            self._read(answer, continuation, writer), name=f"reader of {self.response.id}"
        )
        try:
            # A lost run also ends the reading.
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
            writer.close()
            await writing
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.wait({reading, writing})
        error = reading.result()
        if error is None:
            return None
        if _may_succeed(error):
            return _Again(FIRST_RETRY_S, error)
        await self._fail(error)
        return None

    async def _read(
        self, answer: InnerAnswer, continuation: Continuation, writer: EventWriter
    ) -> ErrorInfo | None:
        """Pass events to the writer; the result is None at the end, or the error before it."""
        async for event in _events_in(answer):
            if "error" in event and event.get("type") in (None, "error"):
                return _info_of(event, status=HTTPStatus.INTERNAL_SERVER_ERROR)
            if not isinstance(event.get("type"), str):
                continue
            shown = shown_event(self.response, event)
            missing = continuation.next(shown)
            self._begin(None)
            if missing is not None:
                writer.add(missing)
            if shown["type"] in ENDS:
                return None
        return BROKEN

    async def _body(self) -> bytes:
        """
        The body for the front.

        Raises:
            ContractError: A turn that the response continues was deleted.
            StoreUnavailableError: The store cannot be used now.
        """
        response, previous = self.response, self.response.previous_response_id
        if previous is None:
            return front_body(response.asked, ())
        turns = await self._tools.rows.chain(response.tenant, previous)
        check_turns(turns, previous)
        return front_body(response.asked, turns)

    async def _refused(self, refusal: Refusal) -> _Again | None:
        if not self.begun.done():
            try:
                await self._tools.rows.remove(self.response.tenant, self.response.id)
            finally:
                self._begin(refusal)
            return None
        if refusal.status in AGAIN_STATUSES and _may_succeed(refusal.info):
            return _Again(refusal.retry_after_s, refusal.info)
        await self._fail(refusal.info)
        return None

    async def _fail(self, error: ErrorInfo) -> None:
        """End the response as failed, or as cancelled if the mesh has cancelled it."""
        response, tools = self.response, self._tools
        is_cancelled = error.code == "cancelled"
        kind = "response.cancelled" if is_cancelled else "response.failed"
        notice = None
        if response.is_background:
            notice = tools.webhooks.notice(response.tenant, kind, response.id)
        ending = partial(ending_of, error=None if is_cancelled else error, notice=notice)
        while True:
            try:
                await tools.rows.end(response.id, ending, epoch=response.epoch)
            except (StoreUnavailableError, StoreFullError) as away:
                log.warning("response.end_waiting", response_id=response.id, error=str(away))
                if await pause(tools.stop, FIRST_RETRY_S):
                    return
            else:
                return

    def _begin(self, result: Refusal | None) -> None:
        if not self.begun.done():
            self.begun.set_result(result)


async def _events_in(answer: InnerAnswer) -> AsyncIterator[Mapping[str, Any]]:
    """The events of an answer, also of one that is sent as a whole."""
    if answer.is_stream:
        async for event in answer.events():
            yield event
        return
    response = _decoded(await answer.whole())
    for event in events_of(response) if response.get("object") == "response" else ():
        yield event


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _info_of(event: Mapping[str, Any], *, status: int) -> ErrorInfo:
    """The error in a refusal or an event; vLLM's own errors have a status as code."""
    error = event.get("error")
    fields = error if isinstance(error, dict) else event
    code = fields.get("code")
    if isinstance(code, int):
        status = code
    if fields.get("type") == AGAIN_TYPE:
        status = HTTPStatus.TOO_MANY_REQUESTS
    return ErrorInfo(
        message=str(fields.get("message") or BROKEN.message),
        code=code if isinstance(code, str) else "server_error",
        status=status,
    )


def _may_succeed(error: ErrorInfo) -> bool:
    """True if the same request may succeed later."""
    if error.code == QUOTA_SPENT:
        return False
    return error.status in AGAIN_STATUSES or error.code in AGAIN_CODES or error is BROKEN
