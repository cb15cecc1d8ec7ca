"""What must be put back after a lost connection or the deletion of a queue."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import structlog

from shared.broker.amqp_subscription import AmqpSubscription
from shared.broker.protocol import BindingSpec, QueueSpec
from shared.contracts.errors import MeshError, QueueNotFoundError

log = structlog.get_logger()

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0


class AmqpRestorer:
    """
    Puts back queues that may vanish, their bindings, and subscriptions, each for itself.

    An exclusive queue can be locked for some heartbeats after a reconnect, while the broker
    still believes in the old connection; hence the retries.

    Args:
        declare: Declares a queue on the consuming connection.
        bind: Binds one.
        is_up: Whether trying makes sense.
    """

    def __init__(
        self,
        *,
        declare: Callable[[QueueSpec], Awaitable[None]],
        bind: Callable[[BindingSpec], Awaitable[None]],
        is_up: Callable[[], bool],
    ) -> None:
        self._declare = declare
        self._bind = bind
        self._is_up = is_up
        self._queues: dict[str, QueueSpec] = {}
        self._bindings: set[BindingSpec] = set()
        self._subscriptions: set[AmqpSubscription] = set()
        self._missing_queues: set[str] = set()
        self._missing_bindings: set[BindingSpec] = set()
        self._wake = asyncio.Event()

    @property
    def complete(self) -> bool:
        return not (
            self._missing_queues
            or self._missing_bindings
            or any(not subscription.running for subscription in self._subscriptions)
        )

    def remember_queue(self, spec: QueueSpec) -> None:
        if spec.exclusive or spec.expires_s is not None:
            self._queues[spec.name] = spec

    def remember_binding(self, spec: BindingSpec) -> None:
        if spec.queue in self._queues:
            self._bindings.add(spec)

    def forget_queue(self, name: str) -> None:
        self._queues.pop(name, None)
        self._missing_queues.discard(name)
        for binding in [b for b in self._bindings if b.queue == name]:
            self.forget_binding(binding)

    def forget_binding(self, spec: BindingSpec) -> None:
        self._bindings.discard(spec)
        self._missing_bindings.discard(spec)

    def add(self, subscription: AmqpSubscription) -> None:
        self._subscriptions.add(subscription)

    def discard(self, subscription: AmqpSubscription) -> None:
        self._subscriptions.discard(subscription)

    def lost(self) -> None:
        """The connection has gone, and all that lived on it."""
        self._missing_queues.update(self._queues)
        self._missing_bindings.update(self._bindings)

    def wake(self) -> None:
        """Something may need putting back."""
        self._wake.set()

    async def close(self) -> None:
        """End all subscriptions, as the connection is about to be closed."""
        for subscription in tuple(self._subscriptions):
            await subscription.close()

    async def run(self) -> None:
        """Put back whatever is missing, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            delay_s = FIRST_RETRY_S
            while self._is_up() and not self.complete:
                if await self._attempt():
                    log.info("broker.restored", subscriptions=len(self._subscriptions))
                    break
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _attempt(self) -> bool:
        errors: list[str] = []
        for putting_back in self._missing():
            try:
                await putting_back
            except MeshError as error:
                errors.append(str(error))
        if errors:
            log.warning("broker.restore_failed", errors=errors[:3], num_errors=len(errors))
        return not errors

    def _missing(self) -> Iterator[Awaitable[None]]:
        """What to await, in turn; while one is awaited, others may be forgotten."""
        for name in tuple(self._missing_queues):
            if name in self._missing_queues:
                yield self._put_back_queue(name)
        for binding in tuple(self._missing_bindings):
            if binding in self._missing_bindings:
                yield self._put_back_binding(binding)
        for subscription in tuple(self._subscriptions):
            if subscription in self._subscriptions and not subscription.running:
                yield self._begin_again(subscription)

    async def _put_back_queue(self, name: str) -> None:
        await self._declare(self._queues[name])
        self._missing_queues.discard(name)

    async def _put_back_binding(self, binding: BindingSpec) -> None:
        await self._bind(binding)
        self._missing_bindings.discard(binding)

    async def _begin_again(self, subscription: AmqpSubscription) -> None:
        try:
            await subscription.start()
        except QueueNotFoundError:
            self._deleted(subscription.queue)  # put back by the next attempt
            raise

    def _deleted(self, name: str) -> None:
        """Somebody deleted a queue, and its bindings with it, while the connection stood."""
        if name in self._queues:
            self._missing_queues.add(name)
            self._missing_bindings.update(b for b in self._bindings if b.queue == name)
