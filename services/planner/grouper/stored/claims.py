"""Claims of ids in the store, before a request under such an id is put into a queue."""

import contextlib
from dataclasses import dataclass, field
from functools import partial

import structlog

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import ContractError, StoreFullError, StoreUnavailableError
from shared.contracts.requests import QueuedRequest, StoredWork
from shared.store.group_commit import GroupCommit
from shared.store.requests.records import Claim, ClaimAsked, Grouped, Key
from shared.store.store import Store

log = structlog.get_logger()

MOST_LATE = 256
CLAIM_PERIOD_S: Seconds = 0.05
"""Least time between two transactions with claims."""
MARK_PERIOD_S: Seconds = 0.1
"""Least time between two transactions with marks of queued requests; nothing waits for a mark."""
RETRY_S: Seconds = 4.0
"""Time for which a message is held if its id cannot be claimed now."""


class IdConflictError(ContractError):
    """Something else was asked under the id of the request."""

    def __init__(self) -> None:
        super().__init__(
            "another request was published under this id; a repeat must have the same body",
            code="id_conflict",
            param="id",
            status=409,
        )


@dataclass(slots=True)
class Claims:
    """
    Claims of one grouper. Claims of concurrent messages are joined into one transaction.

    Args:
        store: The store; None if none is configured.
        holder: Name of this grouper, which no other process has.
    """

    store: Store | None
    holder: str
    _claims: GroupCommit[ClaimAsked, Claim] = field(init=False)
    _grouped: GroupCommit[Grouped, None] = field(init=False)
    _unmarked: dict[Key, Grouped] = field(default_factory=dict)
    """Requests that queues have, and whose rows do not say so yet."""

    def __post_init__(self) -> None:
        if self.store is not None:
            rows = self.store.requests
            self._claims = GroupCommit(
                partial(rows.claim, holder=self.holder), period_s=CLAIM_PERIOD_S
            )
            self._grouped = GroupCommit(rows.mark_grouped, period_s=MARK_PERIOD_S)

    async def claim(self, request: QueuedRequest, stored: StoredWork) -> Claim:
        """
        Decide what happens to a message under an id.

        Args:
            request: The request of the message.
            stored: What the store has to know of it.

        Raises:
            StoreUnavailableError: The store cannot be used now, or does not know yet that a queue
                has the request of this id.
        """
        self._usable()
        if (request.tenant, request.request_id) in self._unmarked:
            raise StoreUnavailableError("the store does not know yet that the request is queued")
        asked = ClaimAsked(
            tenant=request.tenant,
            request_id=request.request_id,
            digest=stored.digest,
            reply_to=request.reply_to,
            kept_s=stored.kept_s,
            model=request.model.name,
            endpoint=_endpoint(request),
        )
        return await self._claims.submit(asked)

    async def grouped(self, request: QueuedRequest, expected_at: UnixTime | None) -> None:
        """
        Note that a queue has the request of a claim: from now on, repeats wait for its final.

        Args:
            request: The request.
            expected_at: Time at which its service is expected to begin; None without a forecast.
        """
        grouped = Grouped(
            tenant=request.tenant,
            request_id=request.request_id,
            at=request.grouped_at,
            lane=request.lane,
            expected_at=expected_at,
        )
        try:
            self._usable()
            await self._grouped.submit(grouped)
        except (StoreUnavailableError, StoreFullError) as error:
            # The message is acknowledged meanwhile: it must not hold the prefetch of others.
            log.warning("claim.unmarked", request_id=request.request_id, error=str(error))
            self._unmarked[grouped.key] = grouped

    async def mark_late(self) -> None:
        """Write the marks that failed before; called periodically."""
        with contextlib.suppress(StoreUnavailableError, StoreFullError):
            while self._unmarked:
                grouped = list(self._unmarked.values())[:MOST_LATE]
                await self._usable().requests.mark_grouped(grouped)
                for each in grouped:
                    self._unmarked.pop(each.key, None)

    async def release(self, request: QueuedRequest) -> None:
        """Forget a claim whose request was refused; without the store it ends by itself."""
        with contextlib.suppress(StoreUnavailableError, StoreFullError):
            key = request.tenant, request.request_id
            await self._usable().requests.release(key, self.holder)

    def _usable(self) -> Store:
        if self.store is None:
            raise StoreUnavailableError("this planner has no store")
        self.store.require()
        return self.store


def _endpoint(request: QueuedRequest) -> str | None:
    """Path of the call that the producer sent; None for a prompt or messages."""
    call = request.call
    return None if call is None or call.plain else call.endpoint
