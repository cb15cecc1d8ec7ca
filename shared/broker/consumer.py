"""Dispatches deliveries to typed handlers; only this module derives a settlement from an error."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar, Union

import msgspec
import structlog

from shared.broker.protocol import Delivery, Settlement
from shared.contracts.base import Decoder, Message, tag_of
from shared.contracts.errors import CapacityError, ContractError, EngineError, TransientError

log = structlog.get_logger()

C = TypeVar("C")

Handler = Callable[[Any, C, Delivery], Awaitable[Settlement | None]]
"""
Handler `async def on_x(message, ctx, delivery)` that returns a settlement; None means ACK.

If the handler settles the delivery itself, the dispatcher's settlement has no effect.
"""
ContractErrorHandler = Callable[[ContractError, C, Delivery], Awaitable[Settlement]]
"""Handles a message that breaks the contract, e.g. answers the sender, and returns a settlement."""

SETTLEMENTS: tuple[tuple[type[Exception], Settlement], ...] = (
    # The first matching row applies.
    (ContractError, Settlement.REJECT),  # the same bytes can never succeed
    (TransientError, Settlement.REQUEUE),  # the broker or a peer is temporarily unreachable
    (CapacityError, Settlement.REQUEUE),  # no capacity now; a later attempt may succeed
    (EngineError, Settlement.REQUEUE),  # another instance may succeed, up to the delivery limit
    (Exception, Settlement.REJECT),  # a bug: the message is dead-lettered for inspection
)

REQUEUE_FIRST_S = 0.1
REQUEUE_MAX_S = 5.0


def settlement_for(error: Exception) -> Settlement:
    """Return the settlement for a message whose handler raised *error*."""
    return next(how for kind, how in SETTLEMENTS if isinstance(error, kind))


async def before_requeue(delivery: Delivery) -> None:
    """
    Wait before *delivery* is requeued: a requeued message is redelivered immediately, and each
    redelivery counts, so that without a wait an outage of one second would use up the delivery
    limit.
    """
    await asyncio.sleep(min(REQUEUE_MAX_S, REQUEUE_FIRST_S * 2**delivery.delivery_count))


class _Kind(msgspec.Struct):
    kind: str = ""


class Dispatcher(Generic[C]):
    """
    Decodes deliveries by message type, calls their handlers and settles the deliveries.

    `dispatcher.handle` is a `DeliveryHandler`. A cancelled handler leaves its delivery unsettled;
    the broker requeues the delivery when the connection is closed.

    Args:
        handlers: Message type -> handler; the decoder accepts these message types.
        ctx: Passed to every handler.
        on_contract_error: Called if the body breaks the schema or the handler raises
            `ContractError`; the default rejects the message.
        on_unknown: Settlement of messages of other kinds: ACK on control queues, where newer
            senders may use new kinds; REJECT on work queues.
    """

    def __init__(
        self,
        handlers: Mapping[type[Message], Handler[C]],
        ctx: C,
        *,
        on_contract_error: ContractErrorHandler[C] | None = None,
        on_unknown: Settlement = Settlement.ACK,
    ) -> None:
        self._handlers = dict(handlers)
        self._kinds = frozenset(tag_of(message_type) for message_type in handlers)
        self._decode: Decoder[Message] = Decoder(Union[tuple(handlers)])  # noqa: UP007  a run-time union
        self._decode_kind: Decoder[_Kind] = Decoder(_Kind)
        self._ctx = ctx
        self._on_contract_error = on_contract_error
        self._on_unknown = on_unknown

    async def handle(self, delivery: Delivery) -> None:
        """Decode and handle a delivery, and settle it. Raises only when cancelled."""
        with structlog.contextvars.bound_contextvars(
            queue=delivery.queue, message_id=delivery.message_id
        ):
            try:
                how = await self._dispatch(delivery)
            except Exception as error:  # noqa: BLE001  SETTLEMENTS says what follows
                how = await self._settlement_after(error, delivery)
            if not await delivery.settle(how):
                log.debug("delivery.gone", kind=delivery.kind)

    async def _dispatch(self, delivery: Delivery) -> Settlement:
        try:
            message = self._decode(delivery.body)
        except ContractError as error:
            kind = self._kind_of(delivery)
            if kind is not None and kind not in self._kinds:
                log.debug("message.ignored", kind=kind)
                return self._on_unknown
            return await self._contract_error(error, delivery)
        try:
            how = await self._handlers[type(message)](message, self._ctx, delivery)
        except ContractError as error:
            return await self._contract_error(error, delivery)
        return Settlement.ACK if how is None else how

    async def _contract_error(self, error: ContractError, delivery: Delivery) -> Settlement:
        log.warning("message.rejected", kind=delivery.kind, code=error.code, error=str(error))
        if self._on_contract_error is None:
            return settlement_for(error)
        return await self._on_contract_error(error, self._ctx, delivery)

    async def _settlement_after(self, error: Exception, delivery: Delivery) -> Settlement:
        how = settlement_for(error)
        if how is Settlement.REQUEUE:
            log.warning("message.requeued", kind=delivery.kind, error=str(error))
            await before_requeue(delivery)
        else:
            log.error("message.rejected", kind=delivery.kind, exc_info=error)
        return how

    def _kind_of(self, delivery: Delivery) -> str | None:
        """Return the `kind` in the body; None if the body has none."""
        try:
            return self._decode_kind(delivery.body).kind or None
        except ContractError:
            return None
