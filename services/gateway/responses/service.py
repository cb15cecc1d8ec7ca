"""Creates, finds, cancels and deletes stored responses of a tenant."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from services.gateway.headers import HINTS, IDEMPOTENCY_KEY, parse_hints
from services.gateway.responses.asked import AskedResponse, check_turns, parse_asked
from services.gateway.responses.feed import Feed
from services.gateway.responses.objects import first_events, queued_object, stored_event
from services.gateway.responses.run import Refusal, ResponseRun
from services.gateway.responses.runner import Runner
from shared.api.sessions import SESSION_HEADERS
from shared.contracts.base import Seconds, TenantId
from shared.contracts.errors import ContractError
from shared.models.registry import ModelRegistry
from shared.store.ids import RESPONSE as RESPONSE_ID
from shared.store.ids import is_response_id, new_response_id
from shared.store.objects.responses import StoredResponse
from shared.store.settings import RESPONSE, StoreSettings
from shared.store.store import Store
from solver.storage.retention import expires_at

REFUSAL_WAIT_S: Seconds = 0.5
"""
Longest time for which the creation of a background response waits whether its request is refused;
a later refusal is a failure of the response.
"""
KEPT_HEADERS = HINTS.union(SESSION_HEADERS)
"""Headers that the front gets."""


@dataclass(frozen=True, slots=True)
class Created:
    """A response that was asked for, and the refusal if the front has refused it."""

    response: StoredResponse
    asked: AskedResponse
    refusal: Refusal | None = None


class Responses:
    """
    Responses of all tenants; each method sees those of one.

    Args:
        store: The store.
        settings: Its settings.
        registry: The models.
        runner: Runs responses.
        feed: Events of responses.
    """

    def __init__(
        self,
        store: Store,
        settings: StoreSettings,
        registry: ModelRegistry,
        runner: Runner,
        feed: Feed,
    ) -> None:
        self.feed = feed
        self._store = store
        self._settings = settings
        self._registry = registry
        self._runner = runner

    async def create(self, tenant: TenantId, body: bytes, headers: Mapping[str, str]) -> Created:
        """
        Store a response, begin to run it, and wait for the begin of its answer; a cancellation of
        this wait abandons the response.

        Args:
            tenant: The tenant.
            body: Body of the request.
            headers: Its headers, names in lower case.

        Raises:
            ContractError: The body is invalid, the model is unknown, or the response to continue
                cannot be continued.
            CapacityError: Too many responses of the tenant run here.
            StoreUnavailableError: The store cannot be used now.
        """
        asked = parse_asked(body)
        self._registry.resolve(asked.model)
        with self._runner.room(tenant):
            if asked.previous_response_id is not None:
                await self.turns(tenant, asked.previous_response_id)
            response = await self._new(tenant, asked, body, headers)
            queued = queued_object(response, msgspec.json.decode(body))
            response = msgspec.structs.replace(response, object=msgspec.json.encode(queued))
            events = [stored_event(event) for event in first_events(queued)]
            added, run = await self._runner.add(response, events)
        if run is None:
            return _repeated(added, asked, response)
        try:
            return Created(added, asked, await _refusal(run))
        except asyncio.CancelledError:  # the client has left
            await self.abandon(added, headers)
            raise

    async def turns(self, tenant: TenantId, previous_id: str) -> list[StoredResponse]:
        """
        The turns that a response after *previous_id* continues, the oldest first.

        Raises:
            ContractError: One is missing, or the last one has no answer.
            StoreUnavailableError: The store cannot be used now.
        """
        turns: Sequence[StoredResponse] = ()
        if is_response_id(previous_id):
            turns = await self._store.responses.chain(tenant, previous_id)
        check_turns(turns, previous_id)
        return list(turns)

    async def turns_before(self, response: StoredResponse) -> list[StoredResponse]:
        """Those turns before *response* that still exist, the oldest first."""
        previous = response.previous_response_id
        if previous is None:
            return []
        return await self._store.responses.chain(response.tenant, previous)

    async def get(self, tenant: TenantId, response_id: str) -> StoredResponse:
        """
        The tenant's response.

        Raises:
            ContractError: The tenant has no such response (status 404).
            StoreUnavailableError: The store cannot be used now.
        """
        rows = self._store.responses
        found = await rows.get(tenant, response_id) if is_response_id(response_id) else None
        if found is None:
            raise _not_found(response_id)
        return found

    async def cancel(self, tenant: TenantId, response_id: str) -> StoredResponse:
        """
        Cancel a background response; no effect after its end.

        Raises:
            ContractError: The tenant has no such response (status 404), or it is not one in the
                background.
            StoreUnavailableError: The store cannot be used now.
        """
        response = await self.get(tenant, response_id)
        if not response.is_background:
            raise ContractError(
                "only responses with background=true can be cancelled", param="response_id"
            )
        if not response.is_running:
            return response
        cancelled = await self._runner.cancel(response)
        if cancelled is None:
            raise _not_found(response_id)
        return cancelled

    async def abandon(self, response: StoredResponse, headers: Mapping[str, str]) -> None:
        """
        Cancel a response whose client has left, unless it runs in the background or has an
        idempotency key, under which the client asks again.

        Args:
            response: The response.
            headers: Headers of the request of the client, names in lower case.
        """
        has_key = parse_hints(headers).idempotency_key is not None
        if not (response.is_background or has_key):
            await self._runner.cancel(response)

    async def delete(self, tenant: TenantId, response_id: str) -> None:
        """
        Delete a response with its events; one that runs is stopped.

        Raises:
            ContractError: The tenant has no such response (status 404).
            StoreUnavailableError: The store cannot be used now.
        """
        removed = None
        if is_response_id(response_id):
            removed = await self._store.responses.remove(tenant, response_id)
        if removed is None:
            raise _not_found(response_id)
        if removed.is_running:
            await self._runner.stop(removed)

    async def _new(
        self, tenant: TenantId, asked: AskedResponse, body: bytes, headers: Mapping[str, str]
    ) -> StoredResponse:
        now = await self._store.database.time()
        key = parse_hints(headers).idempotency_key
        return StoredResponse(
            id=new_response_id(now) if key is None else _id_of(tenant, key),
            tenant=tenant,
            model=asked.model,
            status="queued",
            is_background=asked.is_background,
            asked=body,
            headers=msgspec.json.encode({k: v for k, v in headers.items() if k in KEPT_HEADERS}),
            previous_response_id=asked.previous_response_id,
            created_at=now,
            expires_at=expires_at(
                now, requested_s=None, kept_s=self._settings.retention_of(tenant, RESPONSE)
            ),
            object=b"{}",
            runner=self._runner.name,
        )


async def _refusal(run: ResponseRun) -> Refusal | None:
    """Wait for the begin of the answer, in the background only briefly."""
    limit_s = REFUSAL_WAIT_S if run.response.is_background else None
    # A timeout cancels the future, and the run sees that no caller waits for a refusal.
    try:
        async with asyncio.timeout(limit_s):
            return await run.begun
    except TimeoutError:
        return None


def _repeated(known: StoredResponse, asked: AskedResponse, response: StoredResponse) -> Created:
    """
    The response that was created under the same idempotency key.

    Raises:
        ContractError: It is another one.
    """
    if known.asked != response.asked or known.tenant != response.tenant:
        raise ContractError(
            f"another request was sent with the same header {IDEMPOTENCY_KEY}",
            code="id_conflict",
            param=IDEMPOTENCY_KEY,
            status=409,
        )
    return Created(known, asked)


def _id_of(tenant: TenantId, key: str) -> str:
    """The id of a response with an idempotency key, the same on every gateway."""
    digest = sha256(f"{tenant}\0{key}".encode()).hexdigest()
    return f"{RESPONSE_ID}{digest[:32]}"


def _not_found(response_id: str) -> ContractError:
    return ContractError(
        f"no such response: {response_id[:64]}",
        code="response_not_found",
        param="response_id",
        status=404,
    )
