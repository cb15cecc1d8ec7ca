"""Turns of the instances of one agent to pull from their common queues."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from solver.instance.admission.turns import Turns
from solver.instance.events import Delivered, PullEnded, PullOutcome
from solver.instance.state import InstanceState

Pulled = Delivered | PullEnded
_NOTHING = (PullOutcome.EMPTY, PullOutcome.ABSENT)
"""Results that hold for all instances."""


class SharedTurns:
    """`Turns` on the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(self._loop.time, self._loop.call_later)

    @contextmanager
    def joined(self, instance: InstanceState) -> Iterator[None]:
        """Context in which an instance takes part."""
        self._turns.join(instance)
        try:
            yield
        finally:
            self._turns.leave(instance)

    async def pull(
        self, instance: InstanceState, queue: str, pull: Callable[[str], Awaitable[Pulled]]
    ) -> Pulled:
        """
        Take a request from *queue* by *pull* when it is the turn of *instance*, unless another
        instance finds the queue empty before.
        """
        turn: asyncio.Future[PullEnded | None] = self._loop.create_future()

        def answer(nothing: PullEnded | None) -> None:
            if not turn.done():  # the caller may have been cancelled just before
                turn.set_result(nothing)

        asking = self._turns.ask(instance, queue, lambda: answer(None), answer)
        try:
            nothing = await turn
        except asyncio.CancelledError:
            self._turns.withdraw(asking)
            raise
        if nothing is not None:
            return nothing
        result: Pulled | None = None
        try:
            result = await pull(queue)
        finally:
            shared = (
                result if isinstance(result, PullEnded) and result.outcome in _NOTHING else None
            )
            # After the caller has given the result to the instance, so that its load is known.
            self._loop.call_soon(self._turns.ended, asking, shared)
        return result
