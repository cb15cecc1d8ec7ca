"""Background tasks that belong to one object, and the order in which handlers begin."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.broker.protocol import Delivery, DeliveryHandler
from shared.runtime.events import EventLogger

log = EventLogger(__name__)

T = TypeVar("T")


class OwnedTasks:
    """
    Set of background tasks; running tasks are referenced, and all tasks are ended together.

    A `TaskGroup` would end the whole client when one handler fails, and only the task that opened
    it could close it.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def handle(self, delivery: Delivery, handler: DeliveryHandler) -> None:
        """
        Run *handler* as a background task. An exception is logged and affects no other handler.
        """
        self.spawn(_handled(delivery, handler), name=f"handle {delivery.queue}")

    async def wait(self) -> None:
        """
        Wait until all tasks have ended, including tasks that are added meanwhile.

        A task that calls this method does not wait for itself.
        """
        current = asyncio.current_task()
        while others := [task for task in self._tasks if task is not current]:
            await asyncio.wait(others)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
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


class InTurn:
    """
    Handler of a busy queue that leaves room for those of other queues: its deliveries begin one per
    turn of the event loop, in their order. How many are under way at a time is not limited. A
    delivery that has returned to the broker by then is skipped, since it comes again.

    Args:
        handler: Handles a delivery.
    """

    def __init__(self, handler: DeliveryHandler) -> None:
        self._handler = handler
        self._turn = asyncio.Lock()

    async def __call__(self, delivery: Delivery) -> None:
        """Handle *delivery*, in a turn of its own."""
        async with self._turn:
            await asyncio.sleep(0)
        if not delivery.has_returned():
            await self._handler(delivery)
