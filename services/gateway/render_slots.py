"""Slots for calls that vLLM's application renders, shared fairly by tenants."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError

RETRY_AFTER_S = 2.0


class RenderSlots:
    """
    Limits the number of calls that are rendered at once (checks, chat template, tokenizer), and the
    number that wait for it.

    Tenants with waiting calls take turns. If too many calls wait, the tenant with the most waiting
    calls loses its newest one.

    Args:
        slots: Maximum number of calls that are rendered at once.
        max_waiting: Maximum number of waiting calls.
    """

    def __init__(self, *, slots: int, max_waiting: int) -> None:
        self._free = slots
        self._max_waiting = max_waiting
        self._waiting: dict[TenantId, deque[asyncio.Future[None]]] = {}
        """Waiting calls by tenant; the first tenant has the next turn."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, tenant: TenantId) -> AsyncIterator[Callable[[], None]]:
        """
        Context with a slot for a call of *tenant*, and a function that releases the slot earlier.

        Raises:
            CapacityError: Too many calls wait (status 503).
        """
        await self._acquire(tenant)
        with ExitStack() as held:
            held.callback(self._release)
            yield held.close

    async def _acquire(self, tenant: TenantId) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        if self.num_waiting > self._max_waiting:
            self._refuse_newest()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release()
            else:
                self._drop(tenant, turn)
            raise

    def _release(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():  # a cancelled call leaves the queue a moment later
                turn.set_result(None)
                return
        self._free += 1

    def _refuse_newest(self) -> None:
        tenant = max(self._waiting, key=lambda name: len(self._waiting[name]))
        turn = self._waiting[tenant][-1]
        self._drop(tenant, turn)
        if turn.done():  # its call was cancelled just now
            return
        turn.set_exception(
            CapacityError(
                f"this gateway has {self._max_waiting} requests waiting to be read, its limit",
                retry_after_s=RETRY_AFTER_S,
                status=503,
            )
        )

    def _drop(self, tenant: TenantId, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(tenant, None)
