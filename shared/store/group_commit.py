"""Joins writes of concurrent callers into one transaction: each commit waits for a disk."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_ITEMS = 256


class GroupCommit(Generic[Item, Result]):
    """
    Writes items of concurrent callers together: while one transaction is in progress, the items of
    the next one collect.

    Args:
        write: Writes items in one transaction and returns the result of each, in order.
        period_s: Least time between the starts of two transactions, in which items collect. An item
            that comes later than that after the last start is written at once.
        max_items: Maximum number of items of a transaction.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        period_s: Seconds = 0.0,
        max_items: int = MAX_ITEMS,
    ) -> None:
        self._write = write
        self._period_s = period_s
        self._may_start_at = 0.0
        """Loop time at which the next transaction may start."""
        self._max_items = max_items
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._writer: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """
        Write *item* and return its result, once the transaction is committed.

        An error of the store is raised to all callers whose items the transaction has. After any
        other error, which may be that of one item, each item is written in a transaction of its
        own. A caller that is cancelled does not stop the transaction.
        """
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="group commit")
        return await done

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                delay_s = self._may_start_at - loop.time()
                if delay_s > 0.0 and len(self._waiting) < self._max_items:
                    await asyncio.sleep(delay_s)
                self._may_start_at = loop.time() + self._period_s
                number = min(len(self._waiting), self._max_items)
                group = [self._waiting.popleft() for _ in range(number)]
                await self._write_group(group)
        finally:
            self._writer = None

    async def _write_group(self, group: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._write([item for item, _ in group])
        except asyncio.CancelledError:
            for _, done in group:
                done.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each caller raises it
            if len(group) > 1 and not isinstance(error, MeshError):
                for each in group:
                    await self._write_group([each])
                return
            for _, done in group:
                if not done.done():
                    done.set_exception(error)
            return
        for (_, done), result in zip(group, results, strict=True):
            if not done.done():
                done.set_result(result)
