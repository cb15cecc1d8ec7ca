"""Restores queues, bindings and subscriptions after a lost connection or a deleted queue."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from shared.broker.amqp.subscription import AmqpSubscription
from shared.broker.protocol import BindingSpec, QueueSpec
from shared.contracts.errors import MeshError, QueueNotFoundError
from shared.runtime.events import EventLogger

log = EventLogger(__name__)

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 2.0
BINDINGS_PERIOD_S = 2.0
"""Period of `keep_bindings`."""


class AmqpRestorer:
    """
    Restores volatile queues, bindings and subscriptions, each independently of the others.

    Restoring is retried, since an exclusive queue stays locked until the broker detects, some
    heartbeats later, that the old connection is dead.

    Args:
        declare: Declares a queue on the connection that receives deliveries.
        bind: Creates a binding on the connection that receives deliveries.
        is_up: Returns True if the connection is up; otherwise no attempt is made.
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
        self._missing: set[str | BindingSpec] = set()
        """Names of queues and bindings that must be restored."""
        self.subscriptions: set[AmqpSubscription] = set()
        """Subscriptions that are restarted when they have stopped."""
        self._wake = asyncio.Event()

    @property
    def complete(self) -> bool:
        return not (
            self._missing or any(not subscription.running for subscription in self.subscriptions)
        )

    def remember_queue(self, spec: QueueSpec) -> None:
        if spec.exclusive or spec.expires_s is not None:
            self._queues[spec.name] = spec

    def remember_binding(self, spec: BindingSpec) -> None:
        if spec.queue in self._queues:
            self._bindings.add(spec)

    def forget_queue(self, name: str) -> None:
        self._queues.pop(name, None)
        self._missing.discard(name)
        for binding in [b for b in self._bindings if b.queue == name]:
            self.forget_binding(binding)

    def forget_binding(self, spec: BindingSpec) -> None:
        self._bindings.discard(spec)
        self._missing.discard(spec)

    def lost(self) -> None:
        """
        Record that the connection was lost together with its queues, bindings and subscriptions.
        """
        self._missing.update(self._queues, self._bindings)

    def wake(self) -> None:
        """Trigger an attempt to restore queues, bindings and subscriptions."""
        self._wake.set()

    async def close(self) -> None:
        """End all subscriptions before the connection is closed."""
        for subscription in tuple(self.subscriptions):
            await subscription.close()

    async def run(self) -> None:
        """Restore missing queues, bindings and subscriptions, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            delay_s = FIRST_RETRY_S
            while self._is_up() and not self.complete:
                if await self._attempt():
                    log.info("broker.restored", subscriptions=len(self.subscriptions))
                    break
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def keep_bindings(self) -> None:
        """
        Create all bindings again from time to time, until cancelled: the broker sends no
        notice when an exchange is deleted, with its bindings, and created again.
        """
        while True:
            await asyncio.sleep(BINDINGS_PERIOD_S)
            for binding in tuple(self._bindings):
                if not self._is_up() or binding not in self._bindings:
                    continue
                try:
                    await self._bind(binding)
                except MeshError as error:
                    log.warning("broker.binding_lost", queue=binding.queue, error=str(error))
                    self._missing.add(binding)
                    self.wake()

    async def _attempt(self) -> bool:
        errors: list[str] = []
        for putting_back in self._restorations():
            try:
                await putting_back
            except MeshError as error:
                errors.append(str(error))
        if errors:
            log.warning("broker.restore_failed", errors=errors[:3], num_errors=len(errors))
        return not errors

    def _restorations(self) -> Iterator[Awaitable[None]]:
        """
        Yield restorations, which the caller awaits one by one; what was removed meanwhile is
        skipped.
        """
        for each in (*self._queues, *self._bindings):
            if each in self._missing:
                yield self._put_back(each)
        for subscription in tuple(self.subscriptions):
            if subscription in self.subscriptions and not subscription.running:
                yield self._begin_again(subscription)

    async def _put_back(self, missing: str | BindingSpec) -> None:
        if isinstance(missing, str):
            await self._declare(self._queues[missing])
        else:
            await self._bind(missing)
        self._missing.discard(missing)

    async def _begin_again(self, subscription: AmqpSubscription) -> None:
        try:
            await subscription.start()
        except QueueNotFoundError:
            # The queue was deleted while the connection was up; the next attempt restores it.
            if subscription.queue in self._queues:
                bindings = (b for b in self._bindings if b.queue == subscription.queue)
                self._missing.update([subscription.queue], bindings)
            raise
