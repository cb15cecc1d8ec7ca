"""Background tasks owned by an object."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from shared.broker.protocol import Delivery, DeliveryHandler

log = structlog.get_logger()

T = TypeVar("T")


class OwnedTasks:
    """
    Keeps background tasks alive and ends them together.

    A `TaskGroup` would end the whole client when one handler fails, and could only be closed
    by the task that opened it.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def handle(self, delivery: Delivery, handler: DeliveryHandler) -> None:
        """Run *handler* in the background; an exception is logged and stops no other handler."""
        self.spawn(_handled(delivery, handler), name=f"handle {delivery.queue}")

    async def wait(self) -> None:
        """
        Wait until all tasks are done, including tasks added meanwhile.

        A task does not wait for itself.
        """
        current = asyncio.current_task()
        while others := [task for task in self._tasks if task is not current]:
            await asyncio.wait(others)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they are done."""
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        await self.wait()


async def _handled(delivery: Delivery, handler: DeliveryHandler) -> None:
    try:
        await handler(delivery)
    except Exception:
        log.exception("handler.raised", queue=delivery.queue, kind=delivery.kind)
