"""Replies of stored work: written to the store, then sent to the reply queues of repeats."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from shared.broker import topology
from shared.broker.finals import publish_final
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder, Seconds, TenantId, encode
from shared.contracts.errors import (
    ContractError,
    MessageTooLargeError,
    StoreFullError,
    StoreUnavailableError,
    TransientError,
)
from shared.contracts.requests import Final, RequestCompleted, RequestFailed
from shared.contracts.stored import RunsStarted
from shared.store.group_commit import GroupCommit
from shared.store.requests.records import Ended, Kept, Started
from shared.store.store import Store

log = structlog.get_logger()
_decode: Decoder[Final | RunsStarted] = Decoder(Final | RunsStarted)
_decode_final: Decoder[Final] = Decoder(Final)
COMPLETED = "completed"
PERIOD_S: Seconds = 0.05
"""Least time between two transactions with replies."""
REFUSAL_HEADER = "headway-refusal"
"""Header, `true`: the request was refused before it was grouped."""
RETRY_S: Seconds = 0.5
WAIT_S: Seconds = 60.0
"""Time for which a reply waits in this process for the store, before the broker keeps it again."""


@dataclass(slots=True)
class StoredReplies:
    """
    Handler of the queue `headway.stored`; several groupers can consume it concurrently.

    A reply is acknowledged after its commit, and after the reply queues of repeats have the final.
    A crash in between repeats both, which changes nothing.

    Args:
        broker: The broker.
        store: The store.
        stop: Set when the process stops.
    """

    broker: Broker
    store: Store
    stop: asyncio.Event
    _ended: GroupCommit[Ended, Kept] = field(init=False)

    def __post_init__(self) -> None:
        self._ended = GroupCommit(self.store.requests.end, period_s=PERIOD_S)

    async def on_reply(self, delivery: Delivery) -> None:
        """Write a reply to the store, pass it on, and settle it."""
        try:
            write = self._write_of(delivery)
        except ContractError as error:
            log.error("stored_reply.unreadable", error=str(error))
            await delivery.settle(Settlement.REJECT)
            return
        try:
            await self._until_stored(write)
        except TransientError as error:
            log.warning("stored_reply.deferred", error=str(error))
            await delivery.settle(Settlement.REQUEUE)
        except Exception:  # a bug affects only this reply, which the broker keeps for operators
            log.exception("stored_reply.broken")
            await delivery.settle(Settlement.REJECT)
        else:
            await delivery.settle(Settlement.ACK)

    def _write_of(self, delivery: Delivery) -> Callable[[], Awaitable[None]]:
        """
        What writes a reply to the store; it can be repeated.

        Raises:
            ContractError: The reply is invalid.
        """
        reply = _decode(delivery.body)
        if isinstance(reply, RunsStarted):
            return partial(self._mark_started, reply)
        ended = _ended(_tenant_of(delivery), reply, is_refusal=_is_refusal(delivery))
        return partial(self._keep, ended)

    async def _until_stored(self, write: Callable[[], Awaitable[None]]) -> None:
        """
        Write a reply, as soon as the store can be used.

        Raises:
            TransientError: The store could not be used for a minute, or the broker cannot be used.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            try:
                self.store.require()
                await write()
            except (StoreUnavailableError, StoreFullError) as error:
                if self.stop.is_set() or loop.time() > until:
                    raise TransientError(str(error)) from error
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _mark_started(self, started: RunsStarted) -> None:
        starts = [
            Started(
                tenant=each.tenant,
                request_id=each.request_id,
                instance_id=started.instance_id,
                at=each.at,
            )
            for each in started.starts
        ]
        await self.store.requests.mark_started(starts)

    async def _keep(self, ended: Ended) -> None:
        kept = await self._ended.submit(ended)
        if kept.final is None or not kept.waiters:
            return
        final = _decode_final(kept.final)
        for waiter in kept.waiters:
            try:
                await publish_final(self.broker, final, reply_to=waiter.reply_to)
            except MessageTooLargeError as error:
                log.warning("final.undeliverable", request_id=ended.request_id, error=str(error))
        await self.store.requests.forget_waiters([waiter.id for waiter in kept.waiters])


def _ended(tenant: TenantId, final: Final, *, is_refusal: bool) -> Ended:
    answered_by = None
    match final:
        case RequestCompleted():
            outcome, at = COMPLETED, final.timings.finished_at
            answered_by = Started(
                tenant=tenant,
                request_id=final.request_id,
                instance_id=final.instance_id,
                at=final.timings.submitted_at,
            )
        case RequestFailed():
            outcome, at = final.error.code, final.at
    return Ended(
        tenant=tenant,
        request_id=final.request_id,
        outcome=outcome,
        final=encode(final),
        at=at,
        answered_by=answered_by,
        is_refusal=is_refusal,
    )


def _tenant_of(delivery: Delivery) -> TenantId:
    tenant = delivery.headers.get(topology.TENANT_HEADER)
    if not isinstance(tenant, str):
        raise ContractError(f"header {topology.TENANT_HEADER} is missing")
    return TenantId(tenant)


def _is_refusal(delivery: Delivery) -> bool:
    return delivery.headers.get(REFUSAL_HEADER) == "true"
